"""Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): Llama's parts, with fused weights.

Long versions have LongRoPE, and Phi-4-mini rotates a part of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.family import DecoderFields, Family
from kvc_trt.models.family_weights import Rows, in_one_matrix
from kvc_trt.models.sources.rotary_settings import Length


class _Fields(DecoderFields):
    sliding_window: Length | None = None
    original_max_position_embeddings: Length | None = 4096


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"sliding_window": fields.sliding_window}


def _weights(config: ModelConfig) -> Mapping[str, Rows]:
    query, key = (heads * config.head_size for heads in (config.num_attention_heads, config.num_key_value_heads))
    heads = {f"self_attn.{name}_proj.weight": rows for name, rows in (("q", query), ("k", key), ("v", key))}
    places: dict[str, Rows] = {}
    for layer in range(config.num_hidden_layers):
        places |= in_one_matrix(layer, "self_attn.qkv_proj.weight", heads)
        places |= gate_and_up(config, layer)
    return places


def gate_and_up(config: ModelConfig, layer: int) -> dict[str, Rows]:
    """Return the places of gate and up in the one matrix that Phi-3 and GLM have."""
    both = {f"mlp.{name}_proj.weight": config.intermediate_size for name in ("gate", "up")}
    return in_one_matrix(layer, "mlp.gate_up_proj.weight", both)


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    fields=_Fields,
    describe=_describe,
    harmless=frozenset({"embd_pdrop", "resid_pdrop"}),
    rotary_fraction=1.0,
    weights=_weights,
)
