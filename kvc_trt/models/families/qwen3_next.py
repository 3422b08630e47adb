"""Qwen3-Next (Qwen, 2025): three linear layers (Gated DeltaNet) to one of gated attention, and experts.

A checkpoint has a linear layer's input projections in two matrices, key head by key head.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import Linear, ModelConfig, ModelDescription
from kvc_trt.models.family import Family, GgufArchitecture
from kvc_trt.models.family_weights import Rows
from kvc_trt.models.fields.experts import (
    QWEN_GGUF_KEYS,
    QwenExpertFields,
    experts_of,
    qwen_fields_of,
    qwen_fields_of_gguf,
    qwen_stacks_of,
)
from kvc_trt.models.fields.linear import (
    LinearFields,
    attention_by_layer,
    described,
    fields_of_attention,
    shared_places,
)
from kvc_trt.models.gguf.keys import LATER_TOKENS, GgufKeys
from kvc_trt.models.gguf.linear_layers import (
    LINEAR_KEYS,
    as_they_are,
    linear_fields,
    linear_places,
)
from kvc_trt.models.gguf.names import NORM_BEFORE_FEED_FORWARD
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
        "description": ModelDescription(attention=attention_by_layer(fields), experts=experts),
    }


def fields_of(description: ModelDescription) -> Mapping[str, Any]:
    """Return the fields of config.json for a description's linear layers and experts."""
    return {**fields_of_attention(description), **qwen_fields_of(description)}


def _weights(config: ModelConfig) -> Mapping[str, Rows]:
    places = shared_places(config)
    for layer in range(config.num_hidden_layers):
        part = config.attention(layer).linear
        if part is not None:
            ours = f"model.layers.{layer}.{LINEAR}"
            places |= _by_key_head(part, ours, f"{ours}.in_proj_qkvz.weight", f"{ours}.in_proj_ba.weight")
    return places


def _by_key_head(part: Linear, ours: str, mixed: str | None, of_heads: str) -> dict[str, Rows]:
    """Return the places of a linear layer's rows: those of a key head stand together, with its value heads'.

    `mixed` is the matrix of queries, keys, values and gates, None if it is stored in another way.
    """
    shared = part.value_heads // part.key_heads
    values = shared * part.value_size
    matrices = {
        mixed: {"q": part.key_size, "k": part.key_size, "v": values, "z": values},
        of_heads: {"b": shared, "a": shared},
    }
    places: dict[str, Rows] = {}
    for joined, widths in matrices.items():
        start, step = 0, sum(widths.values())
        for name, width in widths.items():
            if joined is not None:
                places[f"{ours}.{name}_proj.weight"] = Rows(joined, start, width, part.key_heads, step)
            start += width
    return places


def gguf_fields(keys: GgufKeys) -> Mapping[str, Any]:
    """Return the fields of linear layers and of experts that no key of a GGUF file says as config.json does."""
    shared = keys.rows("blk.0.ffn_gate_shexp.weight")
    return {**linear_fields(keys), **qwen_fields_of_gguf(keys), "shared_expert_intermediate_size": shared}


def _places_in_gguf(config: ModelConfig, tensors: Container[str]) -> Mapping[str, Rows]:
    """The first converters left the matrix of queries, keys, values and gates as a checkpoint has it."""
    places = linear_places(config, as_they_are)
    for layer in range(config.num_hidden_layers):
        part, whole = config.attention(layer).linear, f"blk.{layer}.ssm_in.weight"
        if part is not None:
            mixed = whole if whole in tensors else None
            places |= _by_key_head(part, f"model.layers.{layer}.{LINEAR}", mixed, f"blk.{layer}.ssm_ba.weight")
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
    gguf=GgufArchitecture(
        ("qwen3next",),
        keys=QWEN_GGUF_KEYS | LINEAR_KEYS,
        fields=gguf_fields,
        reads=frozenset({LATER_TOKENS}),
        tensors=lambda _config: NORM_BEFORE_FEED_FORWARD,
        weights=_places_in_gguf,
    ),
)
