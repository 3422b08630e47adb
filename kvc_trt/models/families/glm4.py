"""GLM-4 (arXiv 2406.12793): gate and up in one matrix, and neighbouring channels as rotary pairs in half of each head.

The later models of the name Glm4 also add norms of the results of attention and feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvc_trt.models.config import ModelConfig, ModelDescription, Norms
from kvc_trt.models.families.phi3 import gate_and_up
from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture
from kvc_trt.models.family_weights import Rows
from kvc_trt.models.gguf.keys import EPSILON, GgufKeys

_EPSILON = 1.5625e-07


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


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    found = keys[EPSILON]
    if not isinstance(found, float) or not math.isclose(found, _EPSILON, rel_tol=1e-6):
        # The converter knows the older spelling of config.json alone, and loses the rotary base with it.
        raise keys.wrong(EPSILON, f"{_EPSILON:g}, that of GLM-4: a file that says otherwise has lost its settings")
    return {}


GLM = Family(
    architecture="GlmForCausalLM",
    fields=_Fields,
    describe=_describe,
    absent_kv_heads=2,
    absent_head_size=128,
    rotary_fraction=0.5,
    interleaved=True,
    weights=_weights,
    gguf=GgufArchitecture(("chatglm",), interleaved=True, fields=_fields_of_gguf),
)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    describe=_describe_with_norms,
    gguf=GgufArchitecture(("glm4",), interleaved=True),
)
