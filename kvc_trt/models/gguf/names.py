"""Where a GGUF file has the tensors of a decoder: llama.cpp's names for them, and those that it joins."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.family import family
from kvc_trt.models.family_weights import Rows
from kvc_trt.models.gguf.header import GgufTensor
from kvc_trt.models.weights import ATTENTION_RESULT_NORM, FEED_FORWARD_RESULT_NORM, SINKS, expected_tensors

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: part of the configuration, not of the weights."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""LongRoPE's two lists, likewise."""
CONFIGURATION = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
SHARED_GATE = "ffn_gate_inp_shexp.weight"
"""The end of the name of a row that files store as a vector."""

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_AND_UP = ("mlp.gate_proj", "mlp.up_proj")
_INNER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", SINKS: "attn_sinks", ATTENTION_RESULT_NORM: "post_attention_norm",
    "post_attention_layernorm": "ffn_norm", FEED_FORWARD_RESULT_NORM: "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
NORM_BEFORE_FEED_FORWARD = {"post_attention_layernorm": "post_attention_norm"}
"""The name that some families have instead of `ffn_norm`."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")


def places(config: ModelConfig, tensors: Mapping[str, GgufTensor]) -> dict[str, Rows]:
    """Return where each of `expected_tensors` is; a tensor that the file lacks has the place where it would be.

    Queries, keys and values may be one matrix (`attn_qkv`), and so may gate and up (`ffn_up` of twice the rows).
    """
    own = family(config.architecture).gguf
    if own is None:
        return dict(_places(config, tensors, _INNER, {}))
    return dict(_places(config, tensors, _INNER | dict(own.tensors(config)), own.weights(config, tensors)))


def _places(
    config: ModelConfig, tensors: Mapping[str, GgufTensor], inner: Mapping[str, str], known: Mapping[str, Rows]
) -> Iterator[tuple[str, Rows]]:
    """Yield the places of tensors that are `known`, and of the others by the names of a layer's, `inner`."""
    query, key = (heads * config.head_size for heads in (config.num_attention_heads, config.num_key_value_heads))
    starts = dict(zip(_QKV, (0, query, query + key), strict=True))
    for name, shape in expected_tensors(config).items():
        if name in known:
            yield name, known[name]
            continue
        match = _LAYER.fullmatch(name)
        if match is None:
            part = name.rpartition(".")[2]
            yield name, Rows(f"{_OUTER.get(name.removesuffix('.' + part), name)}.{part}")
            continue
        layer, own, part = match.groups(default="weight")
        stored, joined = f"blk.{layer}.{inner[own]}.{part}", None
        if own in _QKV and stored not in tensors:
            joined = Rows(f"blk.{layer}.attn_qkv.{part}", starts[own], shape[0])
        elif own in _GATE_AND_UP and f"blk.{layer}.ffn_gate.{part}" not in tensors:
            joined = Rows(f"blk.{layer}.ffn_up.{part}", shape[0] * _GATE_AND_UP.index(own), shape[0])
            if joined.name in tensors and tensors[joined.name].shape[0] != 2 * shape[0]:
                joined = None
        yield name, joined if joined is not None and joined.name in tensors else Rows(stored)
