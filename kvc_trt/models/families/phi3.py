"""Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): Llama's parts, with fused weights.

Long versions have LongRoPE, and Phi-4-mini rotates a part of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture
from kvc_trt.models.family_weights import Rows, in_one_matrix
from kvc_trt.models.fields.rotary import Length
from kvc_trt.models.gguf.keys import SHARPNESS, WINDOW, GgufKeys

_LISTS = {"long": "rope_factors_long.weight", "short": "rope_factors_short.weight"}
"""Tensors of a GGUF file with the factors of LongRoPE."""


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


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    """LongRoPE's lists are tensors; a window of 0 is none."""
    fields = {"sliding_window": keys[WINDOW] or None}
    if not keys.has(_LISTS["long"]):
        return fields
    channels = keys["rope.dimension_count"]
    if type(channels) is not int:
        raise keys.wrong("rope.dimension_count", f"the number of channels that rotate, beside {_LISTS['long']}")
    factors = {f"{name}_factor": keys.numbers(tensor, channels // 2) for name, tensor in _LISTS.items()}
    original = keys["rope.scaling.original_context_length"]
    scaling = {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
    sharpness = {} if keys[SHARPNESS] is None else {"attention_factor": keys[SHARPNESS]}
    return {**fields, "original_max_position_embeddings": original, "rope_scaling": {**scaling, **sharpness}}


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    fields=_Fields,
    describe=_describe,
    harmless=frozenset({"embd_pdrop", "resid_pdrop"}),
    rotary_fraction=1.0,
    weights=_weights,
    gguf=GgufArchitecture(
        ("phi3",),
        keys={"sliding_window": WINDOW},
        reads=frozenset({SHARPNESS}),
        fields=_fields_of_gguf,
        keeps_spaces=frozenset({"<unk>", "<s>", "<|endoftext|>"}),
    ),
)
