"""Falcon (arXiv 2311.16867): LayerNorm, a plain feed-forward block, and few KV heads: one, or one for each group.

The weights of queries, keys and values are one matrix, KV head by KV head. In the new decoder architecture attention
and feed-forward have a norm each, else they share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import FeedForward, ModelConfig, ModelDescription, Norms
from kvc_trt.models.family import ACTIVATIONS, ActivationName, DecoderFields, Family, GgufArchitecture
from kvc_trt.models.family_weights import Rows, joined_by_kv_head, renamed_in_layers
from kvc_trt.models.fields.rotary import Length
from kvc_trt.models.gguf.keys import GgufKeys

_INNER = {
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_OUTER = {
    "model.embed_tokens.weight": "transformer.word_embeddings.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "model.norm.bias": "transformer.ln_f.bias",
}


class _Fields(DecoderFields):
    # The first checkpoints leave these three out.
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 20, default_factory=lambda given: 4 * given["hidden_size"])]
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)] = 1e-5
    max_position_embeddings: Length = 2048
    hidden_act: ActivationName = "gelu"
    tie_word_embeddings: bool = True
    alibi: bool = False
    bias: bool = False
    multi_query: bool = True
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None
    parallel_attn: bool = True


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    if fields.alibi:
        raise ValueError("alibi is true, expected false: biases by distance (arXiv 2108.12409) are not computed")
    new, parallel = fields.new_decoder_architecture, fields.parallel_attn
    if not parallel and (new or fields.multi_query):
        kind = "new_decoder_architecture" if new else "multi_query"
        raise ValueError(f"parallel_attn is false beside {kind}, expected true")
    two = new and fields.num_ln_in_parallel_attn in (None, 2)
    norms = Norms("layer", bias=True, place="parallel" if two else "shared" if parallel else "before")
    feed_forward = FeedForward(gated=False, activation=ACTIVATIONS[fields.hidden_act], bias=fields.bias)
    own = {
        "qkv_bias": fields.bias,
        "output_bias": fields.bias,
        "description": ModelDescription(norms=norms, feed_forward=feed_forward),
    }
    if new:
        return own
    return own | {"num_key_value_heads": 1 if fields.multi_query else fields.num_attention_heads}


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    """Any number of KV heads is one of the new architecture."""
    place = description.norms.place
    new = place != "before"
    return {
        "bias": description.feed_forward.bias,
        "multi_query": False,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": 2 if place == "parallel" else 1,
        "parallel_attn": new,
    }


def _weights(config: ModelConfig) -> Mapping[str, Rows]:
    norms = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
    if config.description.norms.place == "parallel":
        norms = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
    return {
        **{ours: Rows(theirs) for ours, theirs in _OUTER.items()},
        **renamed_in_layers(config, "transformer.h", _INNER | norms),
        **joined_by_kv_head(config, "transformer.h", "self_attention.query_key_value"),
    }


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    """Converters leave out the base of the rotary embedding, which is 10,000 but in Falcon 11B."""
    two = keys.has("blk.0.attn_norm_2.weight")
    if not two and keys["attention.head_count_kv"] != 1 and keys["rope.freq_base"] is None:
        raise keys.wrong("rope.freq_base", "the base of the rotary embedding: that of Falcon 11B is not the usual one")
    return {
        "bias": keys.has("blk.0.attn_qkv.bias"),
        "multi_query": False,
        "new_decoder_architecture": True,  # which has any number of KV heads
        "num_ln_in_parallel_attn": 2 if two else 1,
    }


def _tensors_of_gguf(config: ModelConfig) -> Mapping[str, str]:
    two = config.description.norms.place == "parallel"
    return {"input_layernorm": "attn_norm_2", "post_attention_layernorm": "attn_norm"} if two else {}


FALCON = Family(
    architecture="FalconForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    harmless=frozenset({"hidden_dropout"}),
    spelling={
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "num_key_value_heads": "num_kv_heads",
        "hidden_act": "activation",
    },
    weights=_weights,
    gguf=GgufArchitecture(("falcon",), fields=_fields_of_gguf, tensors=_tensors_of_gguf),
)
