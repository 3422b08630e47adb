"""gpt-oss (OpenAI, 2025): every second layer slides, sinks in all softmaxes, experts with biases and a clamped gate.

The published checkpoints store experts in MXFP4, which is widened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import Attention, ClampedGate, Experts, ModelConfig, ModelDescription
from kvc_trt.models.family import Family, GgufArchitecture, LayerType
from kvc_trt.models.fields.experts import ExpertFields, count_of
from kvc_trt.models.fields.rotary import Base, Length
from kvc_trt.models.fields.sliding import attention_by_layer, fields_of_attention
from kvc_trt.models.gguf.keys import EXPERTS, EXPERTS_OF_A_TOKEN, WINDOW, GgufKeys
from kvc_trt.models.gguf.names import NORM_BEFORE_FEED_FORWARD
from kvc_trt.models.sources.fused_experts import alternating_gate
from kvc_trt.models.weights import ROUTER, ROUTER_BIAS

_Positive = Annotated[float, Field(ge=1e-3, le=1e6)]
_ABSENT_WINDOW = 128
_GGUF_KEYS = {
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS_OF_A_TOKEN,
    "intermediate_size": "expert_feed_forward_length",
    "sliding_window": WINDOW,
}


class _Fields(ExpertFields):
    num_experts_per_tok: Annotated[int, Field(ge=1, le=1024)] = 4
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)] = 1e-5
    attention_bias: bool = True
    rope_theta: Base = 150000.0
    sliding_window: Length | None = _ABSENT_WINDOW
    layer_types: list[LayerType] | None = None
    swiglu_alpha: _Positive = 1.702
    swiglu_limit: _Positive = 7.0


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if "rope_scaling" not in given and "rope_parameters" not in given:
        raise ValueError("rope_scaling is absent, expected it, or rope_parameters: transformers takes YaRN for it")
    window = {"sliding_window": _ABSENT_WINDOW, **given}
    return {
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "description": ModelDescription(
            attention=attention_by_layer(fields, window, 2, sliding=Attention(), full=Attention()),
            attention_sinks=True,
            experts=Experts(count_of(fields), fields.num_experts_per_tok, fields.intermediate_size),
            clamped_gate=ClampedGate(fields.swiglu_limit, fields.swiglu_alpha),
        ),
    }


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    experts, gate = description.experts, description.clamped_gate
    if experts is None or gate is None:
        return fields_of_attention(description)
    return {
        **fields_of_attention(description),
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "swiglu_limit": gate.limit,
        "swiglu_alpha": gate.gain,
    }


def _stacks(config: ModelConfig) -> Mapping[str, Sequence[str]]:
    layers = [f"model.layers.{layer}" for layer in range(config.num_hidden_layers)]
    names = {ROUTER: "mlp.router.weight", ROUTER_BIAS: "mlp.router.bias"}
    return {f"{layer}.{ours}": [f"{layer}.{theirs}"] for layer in layers for ours, theirs in names.items()}


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    return keys.sliding_fields(2)


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    # Trained with them: an auxiliary loss.
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    absent_kv_heads=8,
    absent_head_size=64,
    # Published configurations state none; what is not in MXFP4 is stored in it.
    absent_dtype="bfloat16",
    stacks=_stacks,
    other_form=alternating_gate,
    mxfp4=True,
    gguf=GgufArchitecture(
        ("gpt-oss",),
        keys=_GGUF_KEYS,
        fields=_fields_of_gguf,
        # llama.cpp rounds the bounds of YaRN's ramp, as other models do; the model was trained without.
        yarn=lambda _keys: {"truncate": False},
        tensors=lambda _config: NORM_BEFORE_FEED_FORWARD,
    ),
)
