"""Gemma 3's text model (arXiv 2503.19786): five sliding layers to one full, each kind with a rotary base of its own.

Norms multiply by one more than their weight; attention and feed-forward have one before and one behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from kvc_trt.models.config import Attention, FeedForward, ModelDescription, Norms
from kvc_trt.models.family import ActivationName, BesideImages, DecoderFields, Family, GgufArchitecture, LayerType
from kvc_trt.models.fields.gemma import sliding_fields_of_gguf, weights_of_norms
from kvc_trt.models.fields.rotary import Base, Length
from kvc_trt.models.fields.sliding import attention_by_layer, fields_of_attention, of_full_layers
from kvc_trt.models.gguf.keys import LOCAL_BASE, WINDOW, GgufKeys

_LAYERS_OF_27B = 62


class _Fields(DecoderFields):
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)] = 1e-6
    tie_word_embeddings: bool = True
    hidden_act: ActivationName = "gelu_pytorch_tanh"
    attention_bias: bool = False
    query_pre_attn_scalar: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    rope_theta: Base = 1e6
    rope_local_base_freq: Base = 1e4
    sliding_window: Length | None = None
    sliding_window_pattern: Annotated[int, Field(ge=1)] = 6
    layer_types: list[LayerType] | None = None
    attn_logit_softcapping: None = None
    final_logit_softcapping: None = None
    use_bidirectional_attention: bool | None = False

    _by_kind = model_validator(mode="before")(of_full_layers)


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if fields.use_bidirectional_attention:
        raise ValueError("use_bidirectional_attention is true, expected false: attention is causal")
    sliding = Attention(rotary_base=fields.rope_local_base_freq)
    every = fields.sliding_window_pattern
    return {
        "qk_norm": True,
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "description": ModelDescription(
            attention=attention_by_layer(fields, given, every, sliding=sliding, full=Attention()),
            norms=Norms(place="both"),
            feed_forward=FeedForward(activation="gelu-tanh"),
            attention_scale=fields.query_pre_attn_scalar**-0.5,
            embedding_scale=fields.hidden_size**0.5,
        ),
    }


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    scale = description.attention_scale
    return {**fields_of_attention(description), "query_pre_attn_scalar": round(scale**-2) if scale else None}


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    return sliding_fields_of_gguf(keys, 6, _LAYERS_OF_27B)


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    fields=_Fields,
    describe=_describe,
    harmless=frozenset({"_sliding_window_pattern", "cache_implementation"}),
    fields_of=_fields_of,
    spelling={"hidden_act": "hidden_activation"},
    absent_kv_heads=4,
    absent_head_size=256,
    weights=weights_of_norms,
    beside_images=BesideImages(
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        {"vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072},
    ),
    # llama.cpp stores norms with the one added.
    gguf=GgufArchitecture(
        ("gemma3",), keys={"sliding_window": WINDOW, "rope_local_base_freq": LOCAL_BASE}, fields=_fields_of_gguf
    ),
)
