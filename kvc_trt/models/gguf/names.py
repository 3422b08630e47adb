"""The names of a GGUF file's tensors in Hugging Face's spelling, and the rows whose order differs."""

from __future__ import annotations

import re
from typing import Any

from numpy.typing import NDArray

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.family import family

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: part of the configuration, not of the weights."""
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"

_OUTER = {
    EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias", HEAD: "lm_head.weight",
}  # fmt: skip
_INNER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")
_ROTATED = re.compile(r".*\.self_attn\.([qk])_proj\.(weight|bias)")


def hugging_face_name(name: str) -> str | None:
    """The tensor's name in a Hugging Face checkpoint; None for a tensor that no decoder here has."""
    if name in _OUTER:
        return _OUTER[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _INNER:
        return None
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"


def interleaved_heads(name: str, config: ModelConfig) -> int | None:
    """The number of heads of a Hugging Face tensor whose rows llama.cpp interleaves; None for all others.

    It rotates neighbouring rows of Llama's heads (2i with 2i+1) where Hugging Face rotates halves (i with i + D/2).
    """
    match = _ROTATED.fullmatch(name)
    stored = family(config.architecture).gguf
    if match is None or stored is None or not stored.interleaved:
        return None
    return config.num_attention_heads if match[1] == "q" else config.num_key_value_heads


def in_halves(rows: NDArray[Any], head_size: int) -> NDArray[Any]:
    """Whole heads of interleaved rows [heads*D, ...] in Hugging Face's order."""
    pairs = rows.reshape(-1, head_size // 2, 2, *rows.shape[1:])
    moved: NDArray[Any] = pairs.swapaxes(1, 2).reshape(rows.shape)
    return moved
