"""Qwen1.5-MoE and Qwen2-57B-A14B (arXiv 2407.10671): Qwen2's parts, experts, and one expert that reads every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import ModelDescription
from kvc_trt.models.families.qwen2 import QwenFields, by_layer
from kvc_trt.models.family import Family, GgufArchitecture
from kvc_trt.models.fields.experts import (
    QWEN_GGUF_KEYS,
    QwenExpertFields,
    experts_of,
    qwen_fields_of,
    qwen_fields_of_gguf,
    qwen_stacks_of,
)
from kvc_trt.models.fields.sliding import fields_of_windows
from kvc_trt.models.gguf.keys import GgufKeys


class _Fields(QwenFields, QwenExpertFields):
    shared_expert_intermediate_size: Annotated[int, Field(ge=1, le=1 << 20)]
    qkv_bias: bool = True


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    experts = experts_of(fields, fields.shared_expert_intermediate_size)
    # Not as in Qwen2: every second of the first layers slides.
    otherwise = [layer % 2 == 0 and layer < fields.max_window_layers for layer in range(fields.num_hidden_layers)]
    return {"qkv_bias": fields.qkv_bias, **by_layer(fields, given, ModelDescription(experts=experts), otherwise)}


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    return {**qwen_fields_of(description), **fields_of_windows(description)}


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    return {
        **qwen_fields_of_gguf(keys),
        "shared_expert_intermediate_size": keys.rows("blk.0.ffn_gate_shexp.weight"),
        "qkv_bias": keys.has("blk.0.attn_q.bias"),
    }


QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    absent_kv_heads=16,
    stacks=qwen_stacks_of,
    gguf=GgufArchitecture(("qwen2moe",), keys=QWEN_GGUF_KEYS, fields=_fields_of_gguf),
)
