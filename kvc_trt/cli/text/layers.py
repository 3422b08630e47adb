"""The layers of an engine, for `inspect --layers`: the measurements behind SqueezeAttention's division, and the tokens
that each layer keeps.

Groups are those of arXiv 2404.04793, algorithm 1: attention changes the residual stream much in G1 and little in G3,
whose layers give up cache. Bytes are those of one row's whole decode state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvc_trt.graph.state import ITEM_SIZE, by_layer, cache_heads, cache_sites
from kvc_trt.profile.traffic import full_state_bytes
from kvc_trt.reference.model.squeeze import groups
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.graph.state import CacheSite
    from kvc_trt.methods.base.parameters import PolicyParameters

_HEADERS = ("layer", "attention", "cosine", "group", "budget", "slots", "bytes per row")
_EACH_PROMPT = "each prompt's"


def full_state(engine: EngineDirectory) -> int:
    """Return the bytes of one row's state if the longest sequence were kept whole, in the engine's cache format."""
    parameters = engine.parameters
    itemsize = ITEM_SIZE[engine.model.dtype]
    return full_state_bytes(engine.model, parameters.max_sequence_len, itemsize, parameters.kv_cache)


def state_line(engine: EngineDirectory) -> str:
    """Return the line below a table of state tensors or layers: their bytes beside those of a whole state."""
    kept, whole = sum(tensor.bytes_per_row() for tensor in engine.state), full_state(engine)
    of_whole = f" of {readable_size(whole)} ({whole / kept:.2f}x)" if kept < whole else ""
    return f"decode state of one row: {readable_size(kept)}{of_whole}"


def layers_json(engine: EngineDirectory) -> dict[str, Any]:
    """Return `layers`, one object per layer, and `cosines`, the sentence that says where they are from.

    `cosine` and `group` (1 to 3) are null where nothing was measured, or where a layer takes no part in the division.
    A linear layer has no `caches`. `budget`, in tokens, is null where a cache keeps everything, keeps the model's
    window, or has each prompt's budget.
    """
    cosines, division = engine.build.layer_cosines, _division(engine)
    sizes = [0] * engine.model.num_hidden_layers
    for tensor in engine.state:
        sizes[tensor.layer] += tensor.bytes_per_row()
    found = []
    for layer, sites in by_layer(engine.model, cache_sites(engine.model, engine.parameters)):
        found.append(
            {
                "layer": layer,
                "attention": _attention(engine.parameters, layer),
                "cosine": None if cosines is None else cosines[layer],
                "group": division.get(layer),
                "caches": [_cache(engine, one) for one in sites],
                "bytes_per_row": sizes[layer],
            }
        )
    return {"layers": found, "cosines": _where_cosines_are(engine)}


def layers_text(engine: EngineDirectory) -> str:
    """Return the table of the layers, and the line about cosines."""
    found, online = layers_json(engine), engine.parameters.squeeze_share is not None
    rows = [
        (
            str(one["layer"]),
            one["attention"],
            _EACH_PROMPT if online else "-" if one["cosine"] is None else f"{one['cosine']:.4f}",
            "-" if one["group"] is None else f"G{one['group']}",
            " + ".join(_EACH_PROMPT if online else _tokens(cache["budget"]) for cache in one["caches"]) or "-",
            " + ".join(f"{cache['slots']:,}" for cache in one["caches"]) or "-",
            readable_size(one["bytes_per_row"]),
        )
        for one in found["layers"]
    ]
    return f"{text_table(_HEADERS, rows, right=(0, 2, 4, 5, 6))}\n{state_line(engine)}\n{found['cosines']}"


def _tokens(budget: int | None) -> str:
    return "all" if budget is None else f"{budget:,}"


def _division(engine: EngineDirectory) -> dict[int, int]:
    """Return the group of every layer that takes part in a division; nothing without cosines."""
    cosines, skipped = engine.build.layer_cosines, engine.parameters.skip_layers
    return {} if cosines is None else dict(enumerate(groups(cosines[skipped:]), start=skipped))


def _attention(parameters: PolicyParameters, layer: int) -> str:
    """Return whether a layer of the model is linear, and whether its attention slides."""
    if parameters.linear_layers is not None and layer in parameters.linear_layers:
        return "linear"
    window = 0 if parameters.layer_windows is None else parameters.layer_windows[layer]
    return f"sliding, {window:,}" if window else "full"


def _cache(engine: EngineDirectory, site: CacheSite) -> dict[str, int | None]:
    heads, rule = cache_heads(engine.model, site), site.parameters
    return {"heads": heads, "budget": _budget(rule), "slots": rule.capacity}


def _budget(rule: PolicyParameters) -> int | None:
    """Return the tokens that a cache's policy keeps: of a prompt, or of everything if a step evicts."""
    if rule.slides or rule.squeeze_share is not None:
        return None
    if rule.evicts_while_decoding:
        return rule.capacity - rule.spare_slots
    return rule.prompt_budget if rule.eviction.evicts else None


def _where_cosines_are(engine: EngineDirectory) -> str:
    build = engine.build
    if build.layer_cosines is not None:
        return "cosines: means over calibration prompts (--layer-budget squeeze); G3 gives cache to G1 and G2"
    if build.layer_budget == "squeeze-online":
        return (
            "cosines and budgets: each prompt's own (--layer-budget squeeze-online), measured in its prefill and not "
            "recorded"
        )
    if build.layer_budget == "squeeze":
        return "cosines: not recorded; a build with --layer-budget squeeze and without layer_budgets measures them"
    return "cosines: none; kvc-trt build --layer-budget squeeze, with a policy that evicts, measures and records them"
