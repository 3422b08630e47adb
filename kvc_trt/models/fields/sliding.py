"""The fields of config.json that say which layers slide, how far, and how they rotate: families share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvc_trt.models.config import Attention, ModelDescription
from kvc_trt.models.family import LayerType

ABSENT_WINDOW = 4096
"""The window that transformers takes for an absent `sliding_window`; null is none."""


class SlidingFields(Protocol):
    """The fields of a family whose layers differ."""

    num_hidden_layers: int
    layer_types: list[LayerType] | None
    sliding_window: int | None


def attention_by_layer(
    fields: SlidingFields, given: Mapping[str, Any], every: int, *, sliding: Attention, full: Attention
) -> tuple[Attention, ...]:
    """Return the attention of each layer: `full`, or `sliding` with the window that the fields state.

    Without `layer_types`, the last of every `every` layers is full. ValueError for a list of another length, and for
    sliding layers without a window. `given` is the whole configuration.
    """
    layers = fields.num_hidden_layers
    kinds: list[LayerType] = fields.layer_types or [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
    ]
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} names, expected one for each of {layers} layers")
    window = fields.sliding_window if "sliding_window" in given else ABSENT_WINDOW
    if window is None and "sliding_attention" in kinds:
        raise ValueError("sliding_window is null, expected a number of tokens: layer_types has sliding layers")
    own = replace(sliding, window=window)
    return tuple(own if kind == "sliding_attention" else full for kind in kinds)


def with_windows(description: ModelDescription, slides: Sequence[bool], window: int | None) -> dict[str, Any]:
    """Return `sliding_window` and `description` of a model in which the layers that `slides` marks have a window.

    It is the model's if they are all layers, and otherwise stands in the attention of each.
    """
    if window is None or not any(slides) or all(slides):
        return {"sliding_window": window if any(slides) else None, "description": description}
    parts = description.attention
    attention = tuple(
        replace(parts[layer % len(parts)], window=window if one else None) for layer, one in enumerate(slides)
    )
    return {"sliding_window": None, "description": replace(description, attention=attention)}


def fields_of_windows(description: ModelDescription) -> dict[str, Any]:
    """Return the fields that say which layers have windows of their own; nothing if none has."""
    return fields_of_attention(description) if any(one.window is not None for one in description.attention) else {}


def fields_of_attention(description: ModelDescription) -> dict[str, Any]:
    """Return the fields of config.json from which `attention_by_layer` reads this description."""
    sliding = next((one for one in description.attention if one.window is not None), None)
    kinds = ["full_attention" if one.window is None else "sliding_attention" for one in description.attention]
    found: dict[str, Any] = {"layer_types": kinds}
    if sliding is not None:
        found["sliding_window"] = sliding.window
    if sliding is not None and sliding.rotary_base is not None:
        found["rope_local_base_freq"] = sliding.rotary_base
    return found


def of_full_layers(given: Any) -> Any:
    """Return a configuration whose `rope_parameters` are those of full layers; the base of sliding ones stands beside.

    That is `rope_local_base_freq`, as in Gemma 3's files. The settings by kind of layer are those of transformers 5;
    ValueError for sliding layers that scale positions. Anything else is returned as it is.
    """
    rotary = given.get("rope_parameters") if isinstance(given, dict) else None
    if not isinstance(rotary, dict) or not rotary.keys() <= {"full_attention", "sliding_attention"}:
        return given
    full, sliding = (rotary.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise ValueError("rope_parameters: expected settings for each kind of layer")
    if sliding.get("rope_type", "default") != "default" or not sliding.keys() <= {"rope_type", "rope_theta"}:
        raise ValueError("rope_parameters.sliding_attention: expected rope_theta and the rope_type default")
    own = {"rope_local_base_freq": sliding["rope_theta"]} if "rope_theta" in sliding else {}
    return {**given, "rope_parameters": full, **own}
