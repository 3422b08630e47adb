"""The parts that Gemma 2 and 3 share: the places of their norms, and fields that their GGUF files leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.family_weights import Rows
from kvc_trt.models.gguf.keys import GgufKeys
from kvc_trt.models.weights import ATTENTION_RESULT_NORM, FEED_FORWARD_RESULT_NORM


def weights_of_norms(config: ModelConfig) -> Mapping[str, Rows]:
    """Return where a checkpoint of Gemma 2 or 3 has its norms, which multiply by one more than their weight."""
    names = {
        "input_layernorm": "input_layernorm",
        ATTENTION_RESULT_NORM: "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        FEED_FORWARD_RESULT_NORM: "post_feedforward_layernorm",
    }
    names |= {name: name for name in ("self_attn.q_norm", "self_attn.k_norm") if config.qk_norm}
    layers = (f"model.layers.{layer}" for layer in range(config.num_hidden_layers))
    norms = {f"{layer}.{ours}": f"{layer}.{theirs}" for layer in layers for ours, theirs in names.items()}
    norms["model.norm"] = "model.norm"
    return {f"{ours}.weight": Rows(f"{theirs}.weight", plus=1.0) for ours, theirs in norms.items()}


def sliding_fields_of_gguf(keys: GgufKeys, every: int, layers_of_27b: int) -> Mapping[str, Any]:
    """Return the fields of Gemma 2 or 3: the last of every `every` layers has full attention, if no key says otherwise.

    No key has the scale of attention. It follows from the size of a head, and in the published model of 27B, which has
    `layers_of_27b` layers, from the hidden size divided by the number of heads.
    """
    size, hidden, heads = (keys[key] for key in ("attention.key_length", "embedding_length", "attention.head_count"))
    if type(size) is not int or type(hidden) is not int or type(heads) is not int or heads < 1:
        raise keys.wrong("attention.key_length", "the width of a head's keys, beside embedding_length and head_count")
    scalar = hidden // heads if keys["block_count"] == layers_of_27b else size
    return {**keys.sliding_fields(every), "query_pre_attn_scalar": scalar}
