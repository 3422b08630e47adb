"""Text of a plan: the bytes that an engine stores and reads, then its figures on GPUs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from kvc_trt.cli.text.plan import gpus
from kvc_trt.cli.text.plan.budgets import assumed_weights
from kvc_trt.cli.text.policy import linear_layers, nothing_compressed, sliding_layers
from kvc_trt.cli.text.printing import number, ranges, section
from kvc_trt.methods.base.parameters import BASELINE
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.sizes import readable_count, readable_size

Plan = Mapping[str, Any]
Caches = Sequence[Mapping[str, Any]]
"""The caches of one layer: `heads` and `slots` of each."""

MOST_KINDS, LAYERS_PER_LINE = 8, 8
WIDTH = 120


def plan_text(plan: Plan) -> str:
    """Return the plan's sections, each a heading and an aligned table."""
    sections = (_head, _choices, _cache, _conversation, _context, _traffic, *gpus.sections(plan), _notes)
    return "\n\n".join(text for one in sections if (text := one(plan)))


def _head(plan: Plan) -> str:
    model, weights = plan["model"], plan["weights"]
    shape = f"{model['layers']} layers, {model['query_heads']}/{model['kv_heads']} heads of {model['head_size']}"
    every, active = weights["parameters"], weights["active_parameters"]
    of_token = f", {readable_count(active)} of them for one token" if active != every else ""
    lines = [
        f"{model['name']}: {model['architecture']}, {shape}, {readable_count(every)} parameters{of_token}",
        f"weights: {weights['format']}, {readable_size(weights['resident_bytes'])} resident, "
        f"{readable_size(weights['read_bytes_per_step'])} read per step",
    ]
    if weights["assumed"]:
        lines.append(assumed_weights(weights["format"]))
    return "\n".join([*lines, *([] if plan["rotary"] is None else [f"rotary: {plan['rotary']}"])])


def _choices(plan: Plan) -> str:
    policy = plan["policy"]
    windows = policy["layer_windows"]
    rows = [[choice["name"], number(choice["value"]), choice["source"]] for choice in plan["choices"]]
    if windows is None or not all(windows):
        rows.append(["capacity", number(policy["capacity"]), "derived: cache slots per compressed layer"])
    split = f" (split {policy['split']})" if "split" in policy else ""
    lines = [section(f"policy {policy['policy']}{split}", ["parameter", "value", "from"], rows, [1])]
    if plan["default_taken"] is not None:
        lines.append(textwrap.fill(plan["default_taken"], WIDTH))
    if not plan["compresses"] and policy["policy"] != BASELINE:
        lines.append(nothing_compressed(policy["token_budget"], policy["max_sequence_len"]))
    if windows is not None:
        lines.append(sliding_layers(windows))
    if policy["linear_layers"] is not None:
        size = readable_size(plan["cache"]["linear_state_bytes_per_row"])
        lines.append(f"{linear_layers(policy['linear_layers'])}: a step reads and writes all {size} of it")
    return "\n".join(lines)


def _cache(plan: Plan) -> str:
    cache = plan["cache"]
    rows = [
        [batch["batch"], readable_size(batch["full_bytes"]), readable_size(batch["compressed_bytes"]), _ratio(batch)]
        for batch in cache["batches"]
    ]
    heading = f"cache (format {cache['format']}, allocated)"
    text = section(heading, ["batch", "full", "compressed", "full/compressed"], rows, [0, 1, 2, 3])
    return "\n".join(line for line in (text, _parts(plan), _layer_kinds(cache["layers"]), _layer_budget(plan)) if line)


def _parts(plan: Plan) -> str:
    """Return the bytes of a compressed row by kind."""
    cache, positions = plan["cache"], plan["conversation"]["slot_positions_bytes_per_row"]
    linear = cache["linear_state_bytes_per_row"]
    coded = cache["format"] != AUTO
    parts = [
        ("codes" if coded else "keys and values", cache["keys_values_bytes_per_row"]),
        ("scales", cache["scales_bytes_per_row"]),
        ("bounds and other state", cache["page_bounds_bytes_per_row"] - positions - linear),
        ("linear state", linear),
        ("positions", positions),
    ]
    text = ", ".join(f"{name} {readable_size(size)}" for name, size in parts if size)
    return textwrap.fill(f"a compressed row: {text}", WIDTH)


def _conversation(plan: Plan) -> str:
    found = plan["conversation"]
    if not found["takes_turns"]:
        return "conversation: an engine of this policy for this backend takes no turns"
    slots = readable_size(found["slot_positions_bytes_per_row"])
    return (
        f"conversation of {number(found['positions'])} positions, turns to {number(found['longest_turn'])} tokens: "
        f"{slots} of each row say where its slots are in the text"
    )


def _context(plan: Plan) -> str:
    context = plan["context"]
    if context["shared_by_default"]:
        shared = "prompts share it automatically, without loss"
    elif context["query_agnostic"]:
        shared = "shared on request; kept tokens do not depend on questions"
    else:
        shared = "shared on request; kept tokens were chosen before questions"
    size = readable_size(context["bytes"])
    return f"stored context or prefix of {number(context['tokens'])} tokens: {size} ({shared})"


def _layer_kinds(layers: Sequence[Caches]) -> str:
    """Return one line per kind of layer, or a few layers per line if there are many kinds.

    Empty where all layers are alike and cache all their heads together.
    """
    kinds: dict[str, list[int]] = {}
    for layer, caches in enumerate(layers):
        kinds.setdefault(_slots(caches), []).append(layer)
    if len(kinds) == 1 and len(layers[0]) == 1:
        return ""
    if len(kinds) <= MOST_KINDS:
        return "\n".join(f"{_layer_names(numbers)}: {slots}" for slots, numbers in kinds.items())
    spans = range(0, len(layers), LAYERS_PER_LINE)
    return "\n".join(_span(start, layers[start : start + LAYERS_PER_LINE]) for start in spans)


def _layer_names(numbers: Sequence[int]) -> str:
    return f"layer{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def _slots(caches: Caches) -> str:
    if not caches:
        return "no cache, a state of constant size"
    if len(caches) == 1:
        return f"{caches[0]['slots']:,} slots"
    return "; ".join(f"{_heads(cache['heads'])} of {cache['slots']:,} slots" for cache in caches)


def _heads(count: int) -> str:
    return f"{count} KV head{'s' * (count > 1)}"


def _span(start: int, layers: Sequence[Caches]) -> str:
    each = ", ".join(" + ".join(f"{cache['slots']:,}" for cache in caches) for caches in layers)
    return f"{_layer_names(range(start, start + len(layers)))}: {each} slots"


def _layer_budget(plan: Plan) -> str:
    """Explain layer budgets that a plan cannot know yet."""
    policy = plan["policy"]
    if plan.get("layer_budget") == "squeeze" and policy["layer_budgets"] is None:
        return "layer budgets: measured on calibration prompts when the engine is built; alike here, as their mean is"
    if policy["squeeze_share"] is None:
        return ""
    room = f"every layer has room for {policy['squeeze_cap']:g} times that"
    if plan["cache"]["used_bytes_per_row"] == plan["cache"]["compressed_bytes_per_row"]:
        return f"layer budgets: set for each prompt, {number(policy['prompt_budget'])} tokens of it on average; {room}"
    cache = plan["cache"]
    used, allocated = (readable_size(cache[f"{name}_bytes_per_row"]) for name in ("used", "compressed"))
    return (
        f"layer budgets: set for each prompt, {number(policy['token_budget'])} tokens on average; {room}; "
        f"a row uses {used} of {allocated} allocated"
    )


def _ratio(batch: Mapping[str, Any]) -> str:
    return f"{batch['full_bytes'] / batch['compressed_bytes']:.2f}x"


def _traffic(plan: Plan) -> str:
    traffic, layers = plan["traffic"], plan["cache"]["layers"]
    full, full_bytes = traffic["full_pairs_per_layer"], traffic["full_bytes_per_row"]
    one = [{"heads": plan["model"]["kv_heads"], "slots": plan["policy"]["capacity"]}]
    name, pairs = "this policy", traffic["pairs_per_layer"]
    if any(caches != one for caches in layers if caches):
        name, pairs = "this policy, on average", full * traffic["bytes_per_row"] / full_bytes
    rows = [
        ["full cache", number(full), readable_size(full_bytes)],
        [name, f"{pairs:,.1f}".removesuffix(".0"), readable_size(traffic["bytes_per_row"])],
    ]
    headers = ["", "tokens read per layer", "bytes of cache per row"]
    return section("one decode step of the longest row (a token is one key and one value)", headers, rows, [1, 2])


def _notes(plan: Plan) -> str:
    return "\n".join(f"- {note}" for note in plan["assumptions"])
