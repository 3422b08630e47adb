"""OLMo 3 (Ai2): OLMo 2's parts, three sliding layers to one full; only full layers may scale positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, model_validator

from kvc_trt.models.config import Attention
from kvc_trt.models.families.olmo2 import OLMO2
from kvc_trt.models.family import DecoderFields, GgufArchitecture, LayerType
from kvc_trt.models.fields.rotary import Base, Length
from kvc_trt.models.fields.sliding import attention_by_layer, fields_of_attention, of_full_layers
from kvc_trt.models.gguf.keys import LOCAL_BASE, SHARPNESS, WINDOW, GgufKeys


class _Fields(DecoderFields):
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)] = 1e-5
    attention_bias: bool = False
    rope_theta: Base = 5e5
    rope_local_base_freq: Base = 5e5
    sliding_window: Length | None = None
    layer_types: list[LayerType] | None = None

    _by_kind = model_validator(mode="before")(of_full_layers)


def _describe(fields: _Fields, given: Mapping[str, Any]) -> Mapping[str, Any]:
    _check_bases(fields, given)
    own, sliding = OLMO2.describe(fields, given), Attention(rotary_base=fields.rope_local_base_freq)
    attention = attention_by_layer(fields, given, 4, sliding=sliding, full=Attention())
    return {**own, "description": replace(own["description"], attention=attention)}


def _check_bases(fields: _Fields, given: Mapping[str, Any]) -> None:
    """Raise ValueError for one base that is not the default: sliding layers have it in transformers 4, not in 5."""
    if "rope_local_base_freq" in given or given.get("rope_parameters") != fields.rope_parameters:
        return  # sliding layers have settings of their own
    base, own = (fields.rope_parameters or {}).get("rope_theta", fields.rope_theta), fields.rope_local_base_freq
    if base != own:
        raise ValueError(
            f"rope_theta is {base:g}, expected {own:g}, or rope_parameters with a rope_theta for full_attention and "
            "another for sliding_attention: releases of transformers disagree about that of sliding layers"
        )


def _yarn_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    """Earlier converters copied `attention_factor` into this key; later ones write the key of all families."""
    return {} if keys[SHARPNESS] in (None, 1.0) else {"attention_factor": keys[SHARPNESS]}


def _fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    if keys["rope.scaling.type"] != "yarn" and keys[SHARPNESS] not in (None, 1.0):
        raise keys.wrong(SHARPNESS, "1.0 without YaRN")
    return {**keys.sliding_fields(4), "rope_local_base_freq": keys[LOCAL_BASE] or keys["rope.freq_base"]}


OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=fields_of_attention,
    gguf=GgufArchitecture(
        ("olmo2",),
        keys={"sliding_window": WINDOW},
        fields=_fields_of_gguf,
        reads=frozenset({SHARPNESS}),
        when=lambda keys: bool(keys[WINDOW]),
        yarn=_yarn_of_gguf,
    ),
)
