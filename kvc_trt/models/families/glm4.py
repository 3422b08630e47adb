"""GLM-4 (arXiv 2406.12793): gate and up in one matrix, and neighbouring channels as rotary pairs in half of each head.

The later models of the name Glm4 also add norms of the results of attention and feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvc_trt.models.config import ModelConfig, ModelDescription, Norms
from kvc_trt.models.families.phi3 import gate_and_up
from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture
from kvc_trt.models.family_weights import Rows


class _Fields(DecoderFields):
    attention_bias: bool = True


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"qkv_bias": fields.attention_bias}


def _describe_with_norms(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_describe(fields, given), "description": ModelDescription(norms=Norms(place="both"))}


def _weights(config: ModelConfig) -> Mapping[str, Rows]:
    return {
        name: rows for layer in range(config.num_hidden_layers) for name, rows in gate_and_up(config, layer).items()
    }


GLM = Family(
    architecture="GlmForCausalLM",
    fields=_Fields,
    describe=_describe,
    absent_kv_heads=2,
    absent_head_size=128,
    rotary_fraction=0.5,
    interleaved=True,
    weights=_weights,
)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    describe=_describe_with_norms,
    gguf=GgufArchitecture(("glm4",), interleaved=True),
)
