"""GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373): LayerNorm, a plain feed-forward block, biases everywhere.

Attention and feed-forward read the same residual stream. The weights of queries, keys and values are one matrix, head
by head; a quarter of each head rotates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.models.config import FeedForward, ModelConfig, ModelDescription, Norms
from kvc_trt.models.family import ACTIVATIONS, ActivationName, DecoderFields, Family, GgufArchitecture
from kvc_trt.models.family_weights import Rows, joined_by_kv_head, renamed_in_layers
from kvc_trt.models.gguf.keys import GgufKeys

_INNER = {
    "self_attn.o_proj": "attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h",
    "input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm",
}  # fmt: skip
_OUTER = {
    "model.embed_tokens.weight": "gpt_neox.embed_in.weight",
    "model.norm.weight": "gpt_neox.final_layer_norm.weight",
    "model.norm.bias": "gpt_neox.final_layer_norm.bias",
    "lm_head.weight": "embed_out.weight",
}

_LAYERS_AND_WIDTH_OF_20B = (44, 6144)


class _Fields(DecoderFields):
    hidden_act: ActivationName = "gelu"
    attention_bias: bool = True
    use_parallel_residual: bool = True


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    norms = Norms("layer", bias=True, place="parallel" if fields.use_parallel_residual else "before")
    feed_forward = FeedForward(gated=False, activation=ACTIVATIONS[fields.hidden_act], bias=True)
    return {
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "description": ModelDescription(norms=norms, feed_forward=feed_forward),
    }


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    return {"use_parallel_residual": description.norms.place == "parallel"}


def _weights(config: ModelConfig) -> Mapping[str, Rows]:
    return {
        **{ours: Rows(theirs) for ours, theirs in _OUTER.items()},
        **renamed_in_layers(config, "gpt_neox.layers", _INNER),
        **joined_by_kv_head(config, "gpt_neox.layers", "attention.query_key_value"),
    }


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    """No key has the activation: GPT-NeoX-20B computes GELU's tanh form, Pythia the exact one."""
    fast = (keys["block_count"], keys["embedding_length"]) == _LAYERS_AND_WIDTH_OF_20B
    return {"hidden_act": "gelu_fast" if fast else "gelu"}


GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    harmless=frozenset({"classifier_dropout", "hidden_dropout"}),
    spelling={
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
    },
    rotary_fraction=0.25,
    weights=_weights,
    gguf=GgufArchitecture(
        ("gptneox",),
        keys={"num_key_value_heads": "attention.head_count", "use_parallel_residual": "use_parallel_residual"},
        fields=_fields_of_gguf,
    ),
)
