"""Command R (Cohere): attention and feed-forward read one LayerNorm without bias; neighbouring channels rotate.

Command R+ also has norms of queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import ModelDescription, Norms
from kvc_trt.models.family import DecoderFields, Family, GgufArchitecture
from kvc_trt.models.fields.rotary import Base
from kvc_trt.models.gguf.keys import GgufKeys
from kvc_trt.models.sources.norms_by_head import NormsByHead


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
    norms = Norms("layer", place="shared", heads="apart" if fields.use_qk_norm else "each")
    return {
        "qk_norm": fields.use_qk_norm,
        "qkv_bias": fields.attention_bias,
        "output_bias": fields.attention_bias,
        "description": ModelDescription(norms=norms, logit_scale=fields.logit_scale),
    }


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    return {"logit_scale": description.logit_scale, "use_qk_norm": description.norms.heads == "apart"}


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    return {"use_qk_norm": keys.has("blk.0.attn_q_norm.weight")}


COHERE = Family(
    architecture="CohereForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    # The published models are made for more positions than their max_position_embeddings.
    spelling={"rms_norm_eps": "layer_norm_eps", "max_sequence_length": "model_max_length"},
    interleaved=True,
    other_form=NormsByHead,
    gguf=GgufArchitecture(
        ("command-r",), interleaved=True, keys={"logit_scale": "logit_scale"}, fields=_fields_of_gguf
    ),
)
