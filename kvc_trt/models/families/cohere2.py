"""Command R7B and Command A (Cohere): Command R's parts, with a window in the layers that rotate, and none in others.

A layer of full attention does not rotate (NoPE).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import Attention, ModelDescription, Norms
from kvc_trt.models.families.cohere import CohereFields
from kvc_trt.models.family import Family, GgufArchitecture, LayerType
from kvc_trt.models.fields.rotary import Length
from kvc_trt.models.fields.sliding import attention_by_layer, fields_of_attention
from kvc_trt.models.gguf.keys import WINDOW


class _Fields(CohereFields):
    layer_types: list[LayerType] | None = None
    sliding_window: Length | None = None
    sliding_window_pattern: Annotated[int, Field(ge=1)] = 4


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if fields.head_dim is not None and fields.head_dim * fields.num_attention_heads != fields.hidden_size:
        expected = fields.hidden_size / fields.num_attention_heads
        raise ValueError(f"head_dim is {fields.head_dim}, expected {expected:g}, the hidden size over the heads")
    every = fields.sliding_window_pattern
    return {
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "description": ModelDescription(
            attention=attention_by_layer(fields, given, every, sliding=Attention(), full=Attention(rotary=False)),
            norms=Norms("layer", place="shared"),
            logit_scale=fields.logit_scale,
        ),
    }


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    return {**fields_of_attention(description), "logit_scale": description.logit_scale}


COHERE2 = Family(
    architecture="Cohere2ForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    spelling={"rms_norm_eps": "layer_norm_eps"},
    interleaved=True,
    gguf=GgufArchitecture(
        ("cohere2",),
        interleaved=True,
        keys={"logit_scale": "logit_scale", "sliding_window": WINDOW},
        fields=lambda keys: keys.sliding_fields(4),
    ),
)
