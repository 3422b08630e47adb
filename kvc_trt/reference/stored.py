"""Keys and values as a cache of 8 or 4 bits stores them: codes, and the numbers that turn codes into values.

    stored = store(keys, format="int8")
    stored.values()  # the values that every later reader of the cache sees

All arithmetic is float32 with correctly rounded division and half-to-even rounding, so that every executor stores the
same bits. docs/cache-formats.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvc_trt.models.cache_formats import FP8, INT4, INT8, VECTOR_FORMATS, VectorFormat

HALF_LARGEST = 65504.0
"""The largest finite number of float16, the type of scales and minima."""
E4M3_LARGEST = 448.0
_EXPONENT_BIAS = 127
_NAN_EXPONENT = 255
_POWERS = torch.cat([torch.exp2(torch.arange(-127, 128, dtype=torch.float64)), torch.tensor([float("nan")])]).float()
"""The power of two that an exponent byte stands for; 255 marks a vector that is not finite."""


class Stored(NamedTuple):
    """Vectors [..., D] as a cache holds them."""

    codes: Tensor
    """[..., D]: int8, float8_e4m3fn or, one element for each 4 bits, uint8."""
    scales: Tensor
    """float16 [..., groups]; for `fp8` the exponent of a power of two plus 127, uint8 [..., 1]."""
    minima: Tensor | None
    """float16 [..., groups] for `int4`, otherwise None."""

    def values(self) -> Tensor:
        """Return the numbers that the codes stand for, float32 [..., D]; NaN in all channels of a vector that was not
        finite."""
        scales = _powers(self.scales) if self.codes.dtype == torch.float8_e4m3fn else self.scales.float()
        grouped = _by_group(self.codes.float(), scales.shape[-1]) * scales[..., None]
        if self.minima is not None:
            grouped = grouped + self.minima.float()[..., None]
        return grouped.flatten(-2)


def store(values: Tensor, *, format: str) -> Stored:
    """Return vectors, `values` [..., D] of any floating-point type, in `int8`, `fp8` or `int4`.

    `int8` has one scale per vector, `fp8` (E4M3) one power of two, `int4` a scale and a minimum for each 32 consecutive
    channels, or one of each where 32 does not divide D. -0 is read as 0, and a minimum is never -0. A vector with a NaN
    or an infinity is stored as NaN and changes no other. Raises ValueError for another format, for vectors without
    channels, and for `int4` with an odd D.
    """
    if format not in _STORE:
        raise ValueError(f"format is {format!r}; expected one of {', '.join(_STORE)}")
    head_size = values.shape[-1] if values.ndim else 0
    if not head_size:
        raise ValueError(f"expected vectors [..., D] that have channels, found shape {list(values.shape)}")
    if format == INT4.name and head_size % 2:
        raise ValueError(f"int4 packs two channels into a byte; expected an even number of channels, found {head_size}")
    wide = values.to(torch.float32) + 0.0  # -0 counts as 0, so that the least of both is one
    finite = wide.isfinite().all(-1, keepdim=True)
    grouped = _by_group(wide.masked_fill(~finite, 0.0), VECTOR_FORMATS[format].groups(head_size))
    stored = _STORE[format](grouped)
    nothing = float("nan") if stored.scales.is_floating_point() else _NAN_EXPONENT
    return Stored(
        stored.codes.flatten(-2),
        stored.scales.masked_fill(~finite, nothing),
        None if stored.minima is None else stored.minima.masked_fill(~finite, nothing),
    )


def _int8(vectors: Tensor) -> Stored:
    """Store finite float32 vectors [..., 1, D]."""
    scales = _scale(vectors.abs().amax(-1) / 127)
    codes = torch.round(vectors / scales.float()[..., None]).clamp(-127, 127)
    return Stored(codes.to(torch.int8), scales, None)


def _fp8(vectors: Tensor) -> Stored:
    """Store finite float32 vectors [..., 1, D] by the smallest exponent that leaves no number above 448."""
    largest = vectors.abs().amax(-1)
    # 448 is 1.75 * 2^8: adding the difference of its mantissa to 2 carries into the exponent of every larger number.
    carried = (largest.view(torch.int32) + 0x1FFFFF) >> 23
    exponents = torch.where(largest > 0, (carried - 8).clamp(0, 254), _EXPONENT_BIAS)
    scaled = vectors * _powers(2 * _EXPONENT_BIAS - exponents)[..., None]
    codes = scaled.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    return Stored(codes, exponents.to(torch.uint8), None)


def _int4(vectors: Tensor) -> Stored:
    """Store finite float32 vectors [..., groups, D / groups]."""
    least, most = vectors.amin(-1), vectors.amax(-1)
    minima = least.clamp(-HALF_LARGEST, HALF_LARGEST).to(torch.float16) + 0.0  # no -0
    scales = _scale((most - least) / 15)
    codes = torch.round((vectors - minima.float()[..., None]) / scales.float()[..., None]).clamp(0, 15)
    return Stored(codes.to(torch.uint8), scales, minima)


def _by_group(vectors: Tensor, groups: int) -> Tensor:
    """Return `vectors` [..., D] as [..., groups, D / groups]."""
    return vectors.reshape(*vectors.shape[:-1], groups, vectors.shape[-1] // groups)


def _powers(exponents: Tensor) -> Tensor:
    """Return the powers of two that exponents plus 127 stand for, on their device."""
    return _POWERS.to(exponents.device)[exponents.long()]


def _scale(wanted: Tensor) -> Tensor:
    """Return positive float32 numbers as float16, 1 where they vanish."""
    scales = wanted.clamp(max=HALF_LARGEST).to(torch.float16)
    return scales.masked_fill(scales == 0, 1.0)


def read_back(values: Tensor, vectors: VectorFormat | None) -> Tensor:
    """Return `values` [..., D] as a cache reads them back, in their type; None stores them as they are."""
    return values if vectors is None else store(values, format=vectors.name).values().to(values.dtype)


_STORE: Mapping[str, Callable[[Tensor], Stored]] = {INT8.name: _int8, FP8.name: _fp8, INT4.name: _int4}
