"""Command R7B and Command A (Cohere): Command R's parts, with a window in the layers that rotate, and none in others.

A layer of full attention does not rotate (NoPE). Within the window every layer attends to everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import Attention, Description, Norms
from kvc_trt.models.families.cohere import CohereFields
from kvc_trt.models.family import Family, LayerType
from kvc_trt.models.sources.rotary_settings import Length


class _Fields(CohereFields):
    layer_types: list[LayerType] | None = None
    sliding_window: Length | None = None
    sliding_window_pattern: Annotated[int, Field(ge=1)] = 4


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if fields.head_dim is not None and fields.head_dim * fields.num_attention_heads != fields.hidden_size:
        expected = fields.hidden_size / fields.num_attention_heads
        raise ValueError(f"head_dim is {fields.head_dim}, expected {expected:g}, the hidden size over the heads")
    sliding = [kind == "sliding_attention" for kind in _kinds(fields)]
    # An absent field means 4096 to transformers, and null no window.
    window = fields.sliding_window if "sliding_window" in given else 4096
    if any(sliding) and window is None:
        raise ValueError("sliding_window is null, expected a number of tokens: layer_types has sliding layers")
    return {
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "sliding_window": window if any(sliding) else None,
        "description": Description(
            attention=tuple(Attention(rotary=one) for one in sliding),
            norms=Norms("layer", place="shared"),
            logit_scale=fields.logit_scale,
        ),
    }


def _kinds(fields: _Fields) -> list[LayerType]:
    """Return the kind of each layer; the last of every `sliding_window_pattern` is full where no list says it."""
    layers, every = fields.num_hidden_layers, fields.sliding_window_pattern
    if fields.layer_types is None:
        return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if len(fields.layer_types) != layers:
        raise ValueError(f"layer_types has {len(fields.layer_types)} names, expected one for each of {layers} layers")
    return fields.layer_types


def _fields_of(description: Description) -> Mapping[str, Any]:
    kinds = ["sliding_attention" if one.rotary else "full_attention" for one in description.attention]
    return {"layer_types": kinds, "logit_scale": description.logit_scale}


COHERE2 = Family(
    architecture="Cohere2ForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    spelling={"rms_norm_eps": "layer_norm_eps"},
    interleaved=True,
)
