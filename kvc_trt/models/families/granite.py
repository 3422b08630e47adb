"""Granite 3 (IBM): Llama's parts, with four constants that multiply embeddings, residuals, attention and logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import Description, FeedForward
from kvc_trt.models.family import DecoderFields, Family

_Multiplier = Annotated[float, Field(ge=1e-6, le=1e6)]


class _Fields(DecoderFields):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: _Multiplier = 1.0
    residual_multiplier: _Multiplier = 1.0
    attention_multiplier: _Multiplier = 1.0
    logits_scaling: _Multiplier = 1.0


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    description = Description(
        feed_forward=FeedForward(bias=fields.mlp_bias),
        attention_scale=fields.attention_multiplier,
        embedding_scale=fields.embedding_multiplier,
        residual_scale=fields.residual_multiplier,
        logit_scale=1 / fields.logits_scaling,
    )
    return {"qkv_bias": fields.attention_bias, "output_bias": fields.attention_bias, "description": description}


def _fields_of(description: Description) -> Mapping[str, Any]:
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


GRANITE = Family(architecture="GraniteForCausalLM", fields=_Fields, describe=_describe, fields_of=_fields_of)
