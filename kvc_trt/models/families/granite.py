"""Granite 3 (IBM): Llama's parts, with four constants that multiply embeddings, residuals, attention and logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import FeedForward, ModelDescription
from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture
from kvc_trt.models.gguf.keys import GgufKeys

_GGUF_KEYS = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
_Multiplier = Annotated[float, Field(ge=1e-6, le=1e6)]


class _Fields(DecoderFields):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: _Multiplier = 1.0
    residual_multiplier: _Multiplier = 1.0
    attention_multiplier: _Multiplier = 1.0
    logits_scaling: _Multiplier = 1.0


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    description = ModelDescription(
        feed_forward=FeedForward(bias=fields.mlp_bias),
        attention_scale=fields.attention_multiplier,
        embedding_scale=fields.embedding_multiplier,
        residual_scale=fields.residual_multiplier,
        logit_scale=1 / fields.logits_scaling,
    )
    return {"qkv_bias": fields.attention_bias, "output_bias": fields.attention_bias, "description": description}


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    return {
        "attention_multiplier": description.attention_scale,
        "embedding_multiplier": description.embedding_scale,
        "residual_multiplier": description.residual_scale,
        "logits_scaling": _divisor(description.logit_scale),
    }


def _divisor(scale: float) -> float:
    """Return a number whose reciprocal is exactly `scale`: rounding twice can miss it by a unit in the last place."""
    near = 1 / scale if scale else math.inf
    candidates = (near, math.nextafter(near, 0), math.nextafter(near, math.inf))
    return next((one for one in candidates if 1 / one == scale), near)


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    """A scale that is absent or 0 is 1, but that of attention is not known then."""
    if not keys["attention.scale"]:
        raise keys.wrong("attention.scale", "the factor of queries and keys")
    return {field: keys[key] or 1.0 for field, key in _GGUF_KEYS.items()}


GRANITE = Family(
    architecture="GraniteForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    gguf=GgufArchitecture(("granite",), interleaved=True, keys=_GGUF_KEYS, fields=_fields_of_gguf),
)
