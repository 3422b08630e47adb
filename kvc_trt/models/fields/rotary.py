"""The rotary settings of a config.json: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`.

Both spellings of the kind are read, `rope_type` and `type`; a key that is not known is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.models.config import LongRope, RopeScaling, RotaryScaling, Yarn
from kvc_trt.validation import ForeignSchema, validated

_MAX_LENGTH = 1 << 26
Length = Annotated[int, Field(ge=1, le=_MAX_LENGTH)]
Base = Annotated[float, Field(ge=1, le=1e12)]
_Fraction = Annotated[float, Field(gt=0, le=1)]
_LARGEST_FACTOR = 1024
_Factor = Annotated[float, Field(ge=1, le=_LARGEST_FACTOR)]
_Stretch = Annotated[float, Field(gt=0, le=1e6)]
_Blend = Annotated[float, Field(ge=1e-3, le=1e3)]
_RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope", "su"]


class RotaryFields(Protocol):
    """The fields of a configuration that say how it rotates."""

    max_position_embeddings: int
    original_max_position_embeddings: int | None
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    partial_rotary_factor: float | None


class _Rope(ForeignSchema):
    """Keys of every kind; old files say `type` for `rope_type`."""

    rope_theta: Base | None = None
    rope_type: _RopeKind | None = None
    type: _RopeKind | None = None
    partial_rotary_factor: _Fraction | None = None


class _Linear(ForeignSchema):
    factor: _Factor


class _Llama3(_Linear):
    low_freq_factor: _Blend
    high_freq_factor: _Blend
    original_max_position_embeddings: Length


class _Yarn(ForeignSchema):
    factor: _Factor | None = None
    original_max_position_embeddings: Length | None = None
    attention_factor: _Blend | None = None
    beta_fast: _Blend = 32.0
    beta_slow: _Blend = 1.0
    mscale: _Blend | None = None
    mscale_all_dim: _Blend | None = None
    truncate: bool = True


class _LongRope(ForeignSchema):
    short_factor: list[_Stretch]
    long_factor: list[_Stretch]
    factor: _Factor | None = None
    original_max_position_embeddings: Length | None = None
    attention_factor: _Blend | None = None


_OF_IMAGES = {"mrope_section", "mrope_interleaved"}
"""Keys that divide the rotary channels among the axes of an image; a token of text has one place on all of them."""
_KNOWN = {name for schema in (_Rope, _Llama3, _Yarn, _LongRope) for name in schema.model_fields} | _OF_IMAGES


def rotary_settings(fields: RotaryFields, source: str) -> tuple[float, RotaryScaling | None, float | None]:
    """Return base, scaling and the share of a head's channels that rotate, None where the file does not say it.

    Raises InputError, naming `source` and the key, for a setting that is not understood, and for two spellings that
    differ.
    """
    base, scaling, fraction = fields.rope_theta, None, fields.partial_rotary_factor
    if fields.rope_parameters is not None:
        base, scaling, fraction = _settings(fields, "rope_parameters", source, base)
    if fields.rope_scaling is not None:
        found = _settings(fields, "rope_scaling", source, base)
        if fields.rope_parameters is not None and found != (base, scaling, fraction):
            raise InputError(f"{source}: rope_scaling says something else than rope_parameters, expected one of them")
        base, scaling, fraction = found
    if isinstance(scaling, Yarn) and base <= 1:
        raise InputError(f"{source}: rope_theta is {base:g}, expected more than 1 with yarn")
    return base, scaling, fraction


def _settings(
    fields: RotaryFields, name: str, source: str, base: float
) -> tuple[float, RotaryScaling | None, float | None]:
    """Return the settings in one of the two spellings; `base` is that of a spelling without one."""
    settings, where = getattr(fields, name), f"{source}: {name}"
    rope = validated(_Rope, settings, where)
    for key in settings:
        if key not in _KNOWN:
            raise InputError(f"{where}: unknown key {describe(key)}{did_you_mean(str(key), sorted(_KNOWN))}")
    base = base if rope.rope_theta is None else rope.rope_theta
    fraction = fields.partial_rotary_factor if rope.partial_rotary_factor is None else rope.partial_rotary_factor
    kind = rope.rope_type or rope.type or "default"
    return base, _KINDS[kind](fields, settings, where), fraction


def stretched_length(longest: int, scaling: RotaryScaling | None) -> int:
    """Return the longest sequence of a model whose file says `longest`, which may be the length before the scaling."""
    if not isinstance(scaling, Yarn):
        return longest
    return min(_MAX_LENGTH, max(longest, int(scaling.factor * scaling.original_max_position_embeddings)))


def _default(_fields: RotaryFields, _settings: Mapping[str, Any], _where: str) -> None:
    return None


def _linear(_fields: RotaryFields, settings: Mapping[str, Any], where: str) -> RotaryScaling:
    return RopeScaling("linear", validated(_Linear, settings, where).factor)


def _llama3(fields: RotaryFields, settings: Mapping[str, Any], where: str) -> RotaryScaling:
    scaling = validated(_Llama3, settings, where)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high <= low:
        raise InputError(f"{where}: high_freq_factor is {high:g}, expected more than low_freq_factor ({low:g})")
    original = fields.original_max_position_embeddings or scaling.original_max_position_embeddings
    return RopeScaling("llama3", scaling.factor, low, high, original)


def _yarn(fields: RotaryFields, settings: Mapping[str, Any], where: str) -> RotaryScaling:
    """Read YaRN's settings; absent ones have transformers' defaults."""
    if "long_factor" in settings:
        raise InputError(f"{where}: long_factor beside yarn, expected the rope_type longrope")
    scaling = validated(_Yarn, settings, where)
    if scaling.beta_fast <= scaling.beta_slow:
        raise InputError(f"{where}: beta_fast is {scaling.beta_fast:g}, expected more than {scaling.beta_slow:g}")
    original = fields.original_max_position_embeddings or scaling.original_max_position_embeddings
    original = original or fields.max_position_embeddings
    factor = scaling.factor or fields.max_position_embeddings / original
    if not 1 <= factor <= _LARGEST_FACTOR:
        raise InputError(
            f"{where}: factor is missing, and max_position_embeddings ({fields.max_position_embeddings}) is {factor:g} "
            f"times original_max_position_embeddings ({original}), expected 1 to {_LARGEST_FACTOR} times"
        )
    attention = scaling.attention_factor
    if attention is None and scaling.mscale and scaling.mscale_all_dim:
        attention = _sharpness(factor, scaling.mscale) / _sharpness(factor, scaling.mscale_all_dim)
    if attention is None:
        attention = _sharpness(factor, 1.0)
    return Yarn(factor, original, attention, scaling.beta_fast, scaling.beta_slow, scaling.truncate)


def _dynamic(_fields: RotaryFields, settings: Mapping[str, Any], where: str) -> RotaryScaling:
    return RopeScaling("dynamic", validated(_Linear, settings, where).factor)


def _longrope(fields: RotaryFields, settings: Mapping[str, Any], where: str) -> RotaryScaling:
    """Read LongRoPE's settings; absent ones have transformers' defaults."""
    scaling = validated(_LongRope, settings, where)
    original = fields.original_max_position_embeddings or scaling.original_max_position_embeddings
    original = original or fields.max_position_embeddings
    factor = scaling.factor or fields.max_position_embeddings / original
    attention = scaling.attention_factor
    if attention is None and factor > 1 and original == 1:
        raise InputError(f"{where}: original_max_position_embeddings is 1, expected more")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRope(tuple(scaling.short_factor), tuple(scaling.long_factor), original, attention)


def _sharpness(factor: float, weight: float) -> float:
    """YaRN, equation 22, with the weight that DeepSeek-V2 gives the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_KINDS: Mapping[str, Callable[[RotaryFields, Mapping[str, Any], str], RotaryScaling | None]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "dynamic": _dynamic,
    "longrope": _longrope, "su": _longrope,
}  # fmt: skip
