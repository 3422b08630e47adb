"""OLMo (arXiv 2402.00838): Llama's parts with LayerNorms that have neither weights nor biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import ModelDescription, Norms
from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture

_EPSILON = 1e-5
"""The constant of the norms, which no field gives."""


class _Fields(DecoderFields):
    attention_bias: bool = False
    clip_qkv: float | None = None
    rms_norm_eps: Annotated[float, Field(ge=_EPSILON, le=_EPSILON)] = _EPSILON


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    if fields.clip_qkv is not None:
        raise ValueError(f"clip_qkv is {fields.clip_qkv:g}, expected null: queries, keys and values are not clipped")
    return {
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "description": ModelDescription(norms=Norms("layer", weight=False)),
    }


OLMO = Family(
    architecture="OlmoForCausalLM",
    fields=_Fields,
    describe=_describe,
    gguf=GgufArchitecture(("olmo",), interleaved=True, fields=lambda _keys: {"rms_norm_eps": _EPSILON}),
)
