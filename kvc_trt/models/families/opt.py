"""OPT (arXiv 2205.01068): LayerNorm, a plain feed-forward block, biases, and a learned vector for each position.

The checkpoint's table of positions begins with two rows that no position has. OPT-350m alone adds norms behind the
residual stream, which no part computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import Attention, FeedForward, ModelConfig, ModelDescription, Norms
from kvc_trt.models.family import ACTIVATIONS, ActivationName, DecoderFields, Family
from kvc_trt.models.family_weights import Rows, renamed_in_layers
from kvc_trt.models.weights import POSITIONS

_UNUSED_POSITIONS = 2
_INNER = {
    "self_attn.q_proj": "self_attn.q_proj", "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj", "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
    "input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm",
}  # fmt: skip


class _Fields(DecoderFields):
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)] = 1e-5
    hidden_act: ActivationName = "relu"
    tie_word_embeddings: bool = True
    do_layer_norm_before: bool = True
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    remove_final_layer_norm: bool = False
    word_embed_proj_dim: int | None = None


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    if not fields.do_layer_norm_before:
        raise ValueError("do_layer_norm_before is false, expected true: norms of the residual stream are not computed")
    if fields.remove_final_layer_norm:
        raise ValueError("_remove_final_layer_norm is true, expected false: the head reads a norm")
    if fields.word_embed_proj_dim not in (None, fields.hidden_size):
        raise ValueError(
            f"word_embed_proj_dim is {fields.word_embed_proj_dim}, expected {fields.hidden_size} as hidden_size: "
            "an embedding of another width is not computed"
        )
    affine, biases = fields.layer_norm_elementwise_affine, fields.enable_bias
    return {
        "qkv_bias": biases,
        "output_bias": biases,
        "description": ModelDescription(
            attention=(Attention(rotary=False),),
            norms=Norms("layer", weight=affine, bias=affine),
            feed_forward=FeedForward(gated=False, activation=ACTIVATIONS[fields.hidden_act], bias=biases),
            learned_positions=True,
        ),
    }


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    return {
        "enable_bias": description.feed_forward.bias,
        "layer_norm_elementwise_affine": description.norms.weight,
    }


def _weights(config: ModelConfig) -> Mapping[str, Rows]:
    norm = {f"model.norm.{part}": Rows(f"model.decoder.final_layer_norm.{part}") for part in ("weight", "bias")}
    return {
        "model.embed_tokens.weight": Rows("model.decoder.embed_tokens.weight"),
        POSITIONS: Rows("model.decoder.embed_positions.weight", _UNUSED_POSITIONS, config.max_position_embeddings),
        **norm,
        **renamed_in_layers(config, "model.decoder.layers", _INNER),
    }


OPT = Family(
    architecture="OPTForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    harmless=frozenset({"dropout", "init_std", "layerdrop"}),
    spelling={
        "intermediate_size": "ffn_dim",
        "hidden_act": "activation_function",
        "remove_final_layer_norm": "_remove_final_layer_norm",
    },
    weights=_weights,
)
