"""Command R (Cohere): attention and feed-forward read one LayerNorm without bias; neighbouring channels rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import ModelDescription, Norms
from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture
from kvc_trt.models.fields.rotary import Base


class CohereFields(DecoderFields):
    """Fields that Command R shares with the models after it."""

    attention_bias: bool = False
    logit_scale: Annotated[float, Field(ge=1e-6, le=1e6)] = 0.0625
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)] = 1e-5
    tie_word_embeddings: bool = True


class _Fields(CohereFields):
    use_qk_norm: bool = False
    rope_theta: Base = 500000.0


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    if fields.use_qk_norm:
        raise ValueError("use_qk_norm is true, expected false: norms with other weights for each head are not computed")
    return {
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "description": ModelDescription(norms=Norms("layer", place="shared"), logit_scale=fields.logit_scale),
    }


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    return {"logit_scale": description.logit_scale}


COHERE = Family(
    architecture="CohereForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    # The published models are made for more positions than their max_position_embeddings.
    spelling={"rms_norm_eps": "layer_norm_eps", "max_sequence_length": "model_max_length"},
    interleaved=True,
    gguf=GgufArchitecture(("command-r",), interleaved=True, keys={"logit_scale": "logit_scale"}),
)
