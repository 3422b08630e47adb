"""Llama 2 and 3 (Touvron et al., arXiv 2307.09288; arXiv 2407.21783), and the many models of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.models.config import FeedForward, ModelDescription
from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture
from kvc_trt.models.gguf.keys import EXPERTS


class _Fields(DecoderFields):
    attention_bias: bool = False
    mlp_bias: bool = False


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "description": ModelDescription(feed_forward=FeedForward(bias=fields.mlp_bias)),
    }


LLAMA = Family(
    architecture="LlamaForCausalLM",
    fields=_Fields,
    describe=_describe,
    harmless=frozenset({"pretraining_tp"}),
    gguf=GgufArchitecture(("llama",), interleaved=True, when=lambda keys: not keys[EXPERTS]),
)
