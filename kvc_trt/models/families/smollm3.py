"""SmolLM3 (Hugging Face, 2025): Llama's parts, with layers whose queries and keys do not rotate (NoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvc_trt.models.config import Attention, FeedForward, ModelDescription
from kvc_trt.models.families.qwen2 import QwenFields, by_layer
from kvc_trt.models.family import Family, GgufArchitecture
from kvc_trt.models.fields.rotary import Base
from kvc_trt.models.fields.sliding import fields_of_windows


class _Fields(QwenFields):
    absent_window: ClassVar[int | None] = None
    attention_bias: bool = False
    mlp_bias: bool = False
    no_rope_layers: list[Annotated[int, Field(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Annotated[int, Field(ge=1)] = 4
    rope_theta: Base = 2000000.0
    tie_word_embeddings: bool = True


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    layers, rotating = fields.num_hidden_layers, fields.no_rope_layers
    if rotating is None:
        rotating = [int((layer + 1) % fields.no_rope_layer_interval != 0) for layer in range(layers)]
    if len(rotating) < layers:
        raise ValueError(f"no_rope_layers has {len(rotating)} numbers, expected one for each of {layers} layers")
    attention = tuple(Attention(rotary=bool(one)) for one in rotating[:layers])
    description = ModelDescription(attention=attention, feed_forward=FeedForward(bias=fields.mlp_bias))
    return {
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        **by_layer(fields, given, description, [not one.rotary for one in attention]),
    }


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    rotating = [int(one.rotary) for one in description.attention]
    return {"no_rope_layers": rotating, **fields_of_windows(description)}


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    absent_kv_heads=4,
    gguf=GgufArchitecture(("smollm3",), interleaved=True),
)
