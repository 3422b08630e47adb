"""OLMo 2 (arXiv 2501.00656): norms of the results of attention and feed-forward, and of all query or key heads
together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.models.config import ModelConfig, ModelDescription, Norms
from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture
from kvc_trt.models.family_weights import Rows
from kvc_trt.models.gguf.keys import WINDOW
from kvc_trt.models.weights import ATTENTION_RESULT_NORM, FEED_FORWARD_RESULT_NORM


class _Fields(DecoderFields):
    attention_bias: bool = False


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "qk_norm": True,
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "description": ModelDescription(norms=Norms(place="after", heads="together")),
    }


def _weights(config: ModelConfig) -> Mapping[str, Rows]:
    names = {ATTENTION_RESULT_NORM: "post_attention_layernorm", FEED_FORWARD_RESULT_NORM: "post_feedforward_layernorm"}
    return {
        f"model.layers.{layer}.{ours}.weight": Rows(f"model.layers.{layer}.{theirs}.weight")
        for layer in range(config.num_hidden_layers)
        for ours, theirs in names.items()
    }


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    fields=_Fields,
    describe=_describe,
    weights=_weights,
    gguf=GgufArchitecture(("olmo2",), when=lambda keys: not keys[WINDOW]),
)
