"""StarCoder2 (arXiv 2402.19173): LayerNorm, a plain feed-forward block, and biases in every product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.models.config import FeedForward, ModelConfig, ModelDescription, Norms
from kvc_trt.models.family import ACTIVATIONS, ActivationName, DecoderFields, Family, GgufArchitecture
from kvc_trt.models.family_weights import Rows, renamed_in_layers
from kvc_trt.models.fields.rotary import Length


class _Fields(DecoderFields):
    hidden_act: ActivationName = "gelu_pytorch_tanh"
    use_bias: bool = True
    sliding_window: Length | None = None
    tie_word_embeddings: bool = True


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    feed_forward = FeedForward(gated=False, activation=ACTIVATIONS[fields.hidden_act], bias=fields.use_bias)
    return {
        "qkv_bias": fields.use_bias,
        "output_bias": fields.use_bias,
        "sliding_window": fields.sliding_window,
        "description": ModelDescription(norms=Norms("layer", bias=True), feed_forward=feed_forward),
    }


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    return {"use_bias": description.feed_forward.bias}


def _weights(config: ModelConfig) -> Mapping[str, Rows]:
    return renamed_in_layers(config, "model.layers", {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})


STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    harmless=frozenset({"embedding_dropout", "residual_dropout"}),
    spelling={"rms_norm_eps": "norm_epsilon"},
    absent_kv_heads=2,
    weights=_weights,
    gguf=GgufArchitecture(("starcoder2",)),
)
