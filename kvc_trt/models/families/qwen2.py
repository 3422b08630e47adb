"""Qwen2 and Qwen2.5 (arXiv 2407.10671, arXiv 2412.15115): Llama's parts, with biases in queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture, LayerType


class QwenFields(DecoderFields):
    """Fields that Qwen2 and Qwen3 share: a window counts for a whole sequence, in whichever layers it is."""

    use_sliding_window: bool = False
    sliding_window: Any = None
    layer_types: list[LayerType] | None = None


def window_of(fields: QwenFields) -> int | None:
    """Return how many tokens attention sees; None for all. ValueError for no number of tokens."""
    window = fields.sliding_window
    if not fields.use_sliding_window or window is None:
        # transformers masks such layers of SmolLM3 whatever use_sliding_window says.
        if "sliding_attention" in (fields.layer_types or ()):
            raise ValueError("layer_types has sliding layers, expected use_sliding_window true and a sliding_window")
        return None
    if type(window) is not int or window < 1:
        raise ValueError(f"sliding_window is {window!r}, expected a number of tokens")
    return window


def _describe(fields: QwenFields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"qkv_bias": True, "sliding_window": window_of(fields)}


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    fields=QwenFields,
    describe=_describe,
    harmless=frozenset({"max_window_layers"}),
    absent_kv_heads=32,
    gguf=GgufArchitecture(("qwen2",)),
)
