"""Qwen3.5's text model (Qwen, 2026), dense: three linear layers (Gated DeltaNet) to one of gated attention."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from kvc_trt.models.config import ModelConfig, ModelDescription
from kvc_trt.models.family import BesideImages, Family, GgufArchitecture
from kvc_trt.models.family_weights import Rows, in_one_matrix
from kvc_trt.models.fields.linear import (
    LinearFields,
    attention_by_layer,
    described,
    fields_of_attention,
    shared_places,
)
from kvc_trt.models.gguf.keys import LATER_TOKENS
from kvc_trt.models.gguf.linear_layers import (
    LINEAR_KEYS,
    first_of_each_key_head_first,
    linear_fields,
    linear_places,
)
from kvc_trt.models.gguf.names import NORM_BEFORE_FEED_FORWARD
from kvc_trt.models.weights import LINEAR


def _describe(fields: LinearFields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**described(fields), "description": ModelDescription(attention=attention_by_layer(fields))}


def separate_matrices(config: ModelConfig) -> Mapping[str, Rows]:
    """Return the places of a linear layer's rows: queries, keys and values one under the other, the rest apart."""
    places = shared_places(config)
    for layer in range(config.num_hidden_layers):
        part = config.attention(layer).linear
        if part is None:
            continue
        widths = {"q": part.keys, "k": part.keys, "v": part.values}
        rows = {f"{LINEAR}.{name}_proj.weight": width for name, width in widths.items()}
        places |= in_one_matrix(layer, f"{LINEAR}.in_proj_qkv.weight", rows)
        prefix = f"model.layers.{layer}.{LINEAR}"
        places |= {f"{prefix}.{name}_proj.weight": Rows(f"{prefix}.in_proj_{name}.weight") for name in "zba"}
    return places


def gguf_places(config: ModelConfig, _tensors: Container[str]) -> Mapping[str, Rows]:
    """Return where a GGUF file has the weights of linear layers, and the gates of full ones."""
    return linear_places(config, first_of_each_key_head_first)


QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    fields=LinearFields,
    describe=_describe,
    fields_of=fields_of_attention,
    absent_kv_heads=4,
    absent_head_size=256,
    rotary_fraction=0.25,
    weights=separate_matrices,
    beside_images=BesideImages("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    gguf=GgufArchitecture(
        ("qwen35",),
        keys=LINEAR_KEYS,
        fields=linear_fields,
        reads=frozenset({LATER_TOKENS}),
        tensors=lambda _config: NORM_BEFORE_FEED_FORWARD,
        weights=gguf_places,
    ),
)
