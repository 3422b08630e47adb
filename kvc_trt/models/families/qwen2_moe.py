"""Qwen1.5-MoE and Qwen2-57B-A14B (arXiv 2407.10671): Qwen2's parts, experts, and one expert that reads every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import ModelDescription
from kvc_trt.models.families.qwen2 import QwenFields, window_of
from kvc_trt.models.family import Family, GgufArchitecture
from kvc_trt.models.fields.experts import (
    QWEN_GGUF_KEYS,
    QwenExpertFields,
    experts_of,
    qwen_fields_of,
    qwen_fields_of_gguf,
    qwen_stacks_of,
)
from kvc_trt.models.gguf.keys import GgufKeys


class _Fields(QwenFields, QwenExpertFields):
    shared_expert_intermediate_size: Annotated[int, Field(ge=1, le=1 << 20)]
    qkv_bias: bool = True


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    experts = experts_of(fields, fields.shared_expert_intermediate_size)
    return {
        "qkv_bias": fields.qkv_bias,
        "sliding_window": window_of(fields),
        "description": ModelDescription(experts=experts),
    }


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
    fields_of=qwen_fields_of,
    harmless=frozenset({"max_window_layers", "output_router_logits", "router_aux_loss_coef"}),
    absent_kv_heads=16,
    stacks=qwen_stacks_of,
    gguf=GgufArchitecture(("qwen2moe",), keys=QWEN_GGUF_KEYS, fields=_fields_of_gguf),
)
