"""Qwen3-Next (Qwen, 2025): three linear layers (Gated DeltaNet) to one of gated attention, and experts.

A checkpoint has what a linear layer reads of the stream in two matrices, key head by key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import Description, Linear, ModelConfig
from kvc_trt.models.family import Family
from kvc_trt.models.family_weights import Rows
from kvc_trt.models.fields.experts import QwenExpertFields, experts_of, qwen_fields_of, qwen_stacks_of
from kvc_trt.models.fields.linear import (
    LinearFields,
    attention_by_layer,
    described,
    fields_of_attention,
    shared_places,
)
from kvc_trt.models.weights import LINEAR


class _Fields(LinearFields, QwenExpertFields):
    shared_expert_intermediate_size: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    moe_intermediate_size: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    norm_topk_prob: bool = True


def describe(fields: Any, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of `ModelConfig` that follow from those of linear layers and of experts."""
    experts = experts_of(fields, fields.shared_expert_intermediate_size)
    return {
        **described(fields),
        "description": Description(attention=attention_by_layer(fields), experts=experts),
    }


def fields_of(description: Description) -> Mapping[str, Any]:
    """Return the fields of linear layers and of experts that say what a description says."""
    return {**fields_of_attention(description), **qwen_fields_of(description)}


def _weights(config: ModelConfig) -> Mapping[str, Rows]:
    places = shared_places(config)
    for layer in range(config.num_hidden_layers):
        part = config.attention(layer).linear
        if part is not None:
            places |= _by_key_head(part, f"model.layers.{layer}.{LINEAR}")
    return places


def _by_key_head(part: Linear, layer: str) -> dict[str, Rows]:
    """Return the places of a linear layer's rows: those of a key head stand together, with its value heads'."""
    shared = part.value_heads // part.key_heads
    values = shared * part.value_size
    matrices = {
        "in_proj_qkvz": {"q": part.key_size, "k": part.key_size, "v": values, "z": values},
        "in_proj_ba": {"b": shared, "a": shared},
    }
    places: dict[str, Rows] = {}
    for joined, widths in matrices.items():
        start, step = 0, sum(widths.values())
        for name, width in widths.items():
            theirs = f"{layer}.{joined}.weight"
            places[f"{layer}.{name}_proj.weight"] = Rows(theirs, start, width, part.key_heads, step)
            start += width
    return places


QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    fields=_Fields,
    describe=describe,
    fields_of=fields_of,
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    absent_kv_heads=2,
    absent_head_size=256,
    rotary_fraction=0.25,
    weights=_weights,
    stacks=qwen_stacks_of,
)
