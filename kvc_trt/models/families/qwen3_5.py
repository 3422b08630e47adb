"""Qwen3.5's text model (Qwen, 2026), dense: three linear layers (Gated DeltaNet) to one of gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from kvc_trt.models.config import Description, ModelConfig
from kvc_trt.models.family import Family
from kvc_trt.models.family_weights import Rows, in_one_matrix
from kvc_trt.models.sources.linear_fields import (
    LinearFields,
    attention_by_layer,
    described,
    fields_of_attention,
    shared_places,
)
from kvc_trt.models.weights import LINEAR

_OF_IMAGES = frozenset({"mrope_section", "mrope_interleaved"})
"""Keys that divide the rotary channels among the axes of an image; a token of text has one place on all of them."""


class _Fields(LinearFields):
    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        rotary = given.get("rope_parameters") if isinstance(given, dict) else None
        if not isinstance(rotary, dict):
            return given
        return {**given, "rope_parameters": {name: rotary[name] for name in rotary if name not in _OF_IMAGES}}


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**described(fields), "description": Description(attention=attention_by_layer(fields))}


def _weights(config: ModelConfig) -> Mapping[str, Rows]:
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


QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=fields_of_attention,
    absent_kv_heads=4,
    absent_head_size=256,
    rotary_fraction=0.25,
    weights=_weights,
)
