"""Qwen2 and Qwen2.5 (arXiv 2407.10671, arXiv 2412.15115): Llama's parts, with biases in queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvc_trt.models.config import ModelDescription
from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture, LayerType
from kvc_trt.models.fields.sliding import ABSENT_WINDOW, fields_of_windows, with_windows


class QwenFields(DecoderFields):
    """Fields that Qwen2, Qwen3 and SmolLM3 share: a window, and the layers that have it."""

    absent_window: ClassVar[int | None] = ABSENT_WINDOW
    """The window of a configuration that states none; null is none."""
    use_sliding_window: bool = False
    sliding_window: Any = None
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    """So many first layers attend to everything."""
    layer_types: list[LayerType] | None = None


def window_of(fields: QwenFields, given: Mapping[str, Any]) -> int | None:
    """Return how many tokens layers with a window see; None if there are none. ValueError for no number of tokens.

    `given` is the whole configuration.
    """
    window = fields.sliding_window if "sliding_window" in given else fields.absent_window
    if not fields.use_sliding_window or window is None:
        # transformers masks such layers of SmolLM3 whatever use_sliding_window says.
        if "sliding_attention" in (fields.layer_types or ()):
            raise ValueError("layer_types has sliding layers, expected use_sliding_window true and a sliding_window")
        return None
    if type(window) is not int or window < 1:
        raise ValueError(f"sliding_window is {window!r}, expected a number of tokens")
    return window


def by_layer(
    fields: QwenFields, given: Mapping[str, Any], description: ModelDescription, otherwise: Sequence[bool]
) -> dict[str, Any]:
    """Return `sliding_window` and `description`: by `layer_types`, and otherwise where `otherwise` says.

    ValueError for a list of another length than the layers.
    """
    window, kinds, layers = window_of(fields, given), fields.layer_types, fields.num_hidden_layers
    if kinds is not None and len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} names, expected one for each of {layers} layers")
    slides = otherwise if kinds is None else [kind == "sliding_attention" for kind in kinds]
    return with_windows(description, slides, window)


def after_first_layers(fields: QwenFields) -> list[bool]:
    """Return for each layer whether it comes after the first `max_window_layers`."""
    return [layer >= fields.max_window_layers for layer in range(fields.num_hidden_layers)]


def _describe(fields: QwenFields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"qkv_bias": True, **by_layer(fields, given, ModelDescription(), after_first_layers(fields))}


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    fields=QwenFields,
    describe=_describe,
    fields_of=fields_of_windows,
    absent_kv_heads=32,
    gguf=GgufArchitecture(("qwen2",)),
)
