"""Qwen3-30B-A3B and Qwen3-235B-A22B (arXiv 2505.09388): Qwen3's parts with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    attention_bias: bool = False


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "qk_norm": True,
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "sliding_window": window_of(fields, given),
        "description": ModelDescription(experts=experts_of(fields)),
    }


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    return {**qwen_fields_of_gguf(keys), "norm_topk_prob": True}  # so llama.cpp, which has no key for it


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=qwen_fields_of,
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    absent_kv_heads=4,
    stacks=qwen_stacks_of,
    gguf=GgufArchitecture(("qwen3moe",), keys=QWEN_GGUF_KEYS, fields=_fields_of_gguf),
)
