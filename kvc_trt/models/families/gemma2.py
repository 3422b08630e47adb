"""Gemma 2 (arXiv 2408.00118): every second layer slides, and the logits of attention and vocabulary are capped.

Norms multiply by one more than their weight; attention and feed-forward have one before and one behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import Attention, FeedForward, ModelDescription, Norms
from kvc_trt.models.family import ActivationName, DecoderFields, Family, GgufArchitecture, LayerType
from kvc_trt.models.fields.gemma import sliding_fields_of_gguf, weights_of_norms
from kvc_trt.models.fields.rotary import Length
from kvc_trt.models.fields.sliding import attention_by_layer, fields_of_attention
from kvc_trt.models.gguf.keys import WINDOW, GgufKeys

_LAYERS_OF_27B = 46
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
"""Fields of config.json -> keys of a GGUF file; absent ones have the defaults of the fields."""
_Cap = Annotated[float, Field(ge=1e-3, le=1e6)] | None


class _Fields(DecoderFields):
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)] = 1e-6
    tie_word_embeddings: bool = True
    hidden_act: ActivationName = "gelu_pytorch_tanh"
    attention_bias: bool = False
    query_pre_attn_scalar: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    sliding_window: Length | None = None
    layer_types: list[LayerType] | None = None
    attn_logit_softcapping: _Cap = 50.0
    final_logit_softcapping: _Cap = 30.0
    use_bidirectional_attention: bool | None = None


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if fields.use_bidirectional_attention:
        raise ValueError("use_bidirectional_attention is true, expected false: attention is causal")
    caps = {name: None if name in given and given[name] is None else getattr(fields, name) for name in _CAPS}
    return {
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "description": ModelDescription(
            attention=attention_by_layer(fields, given, 2, sliding=Attention(), full=Attention()),
            norms=Norms(place="both"),
            feed_forward=FeedForward(activation="gelu-tanh"),
            attention_scale=fields.query_pre_attn_scalar**-0.5,
            attention_softcap=caps["attn_logit_softcapping"],
            embedding_scale=fields.hidden_size**0.5,
            logit_softcap=caps["final_logit_softcapping"],
        ),
    }


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    scale = description.attention_scale
    return {
        **fields_of_attention(description),
        "query_pre_attn_scalar": round(scale**-2) if scale else None,
        "attn_logit_softcapping": description.attention_softcap,
        "final_logit_softcapping": description.logit_softcap,
    }


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    return sliding_fields_of_gguf(keys, 2, _LAYERS_OF_27B)


GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    fields=_Fields,
    describe=_describe,
    # Published files have these beside hidden_activation and sliding_window, which alone are read.
    harmless=frozenset({"cache_implementation", "hidden_act", "sliding_window_size"}),
    fields_of=_fields_of,
    spelling={"hidden_act": "hidden_activation"},
    absent_kv_heads=4,
    absent_head_size=256,
    weights=weights_of_norms,
    # llama.cpp stores norms with the one added.
    gguf=GgufArchitecture(("gemma2",), keys={"sliding_window": WINDOW, **_CAPS}, fields=_fields_of_gguf),
)
