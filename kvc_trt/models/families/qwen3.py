"""Qwen3 (arXiv 2505.09388), dense: Llama's parts, with norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.models.config import ModelDescription
from kvc_trt.models.families.qwen2 import QwenFields, after_first_layers, by_layer
from kvc_trt.models.family import BesideImages, Family, GgufArchitecture
from kvc_trt.models.fields.sliding import fields_of_windows


class _Fields(QwenFields):
    attention_bias: bool = False


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    biased = fields.attention_bias
    windows = by_layer(fields, given, ModelDescription(), after_first_layers(fields))
    return {"qk_norm": True, "qkv_bias": biased, "output_bias": biased, **windows}


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=fields_of_windows,
    absent_kv_heads=32,
    absent_head_size=128,
    beside_images=BesideImages(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl_text",
        {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "max_position_embeddings": 128000},
    ),
    gguf=GgufArchitecture(("qwen3", "qwen3vl")),
)
