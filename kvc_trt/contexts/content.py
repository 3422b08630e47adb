"""Find numbers in a context that no engine can have written, by their bits: some 10 GB/s, where hashing does 1.8.

Keys, values and the state beside them are finite. Where keys and values have a cache format, their codes, scales and
minima are some that `reference/stored.py` makes of finite vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.cache_formats import FP8, INT4, INT8, VectorFormat
from kvc_trt.runtime.context import Array, Context

Bits: TypeAlias = "NDArray[np.unsignedinteger]"

_EXPONENTS: Mapping[str, int] = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000}
"""Type -> its bits of the exponent: all of them are set in NaN and infinities, and in no other number."""
_AT_A_TIME = 1 << 18
"""Bytes that are looked at at once; they stay in a processor's cache."""
_LARGEST_EXPONENT, _FIRST_BEYOND = 247, 0x78
"""The byte that `fp8` has for the largest float32, and the first code, without its sign, that is no float32 with it."""


class Impossible(NamedTuple):
    """Numbers that a tensor cannot hold."""

    found: str
    among: Callable[[Bits], bool | np.bool_]
    """True if there is one among these, given by their bits."""


def impossible(context: Context) -> str | None:
    """Return which tensor of a context no engine can have written, and why; None if each of them may be one's.

    Logits may be -infinity, for tokens that are never drawn.
    """
    if not np.isfinite(context.logits.max()):
        return "tensor logits holds no finite number to draw a token by"
    for name, tensor in context.tensors.items():
        for found, among in _never_in(name, context.tensors):
            if any(map(among, _pieces(tensor))):
                return f"tensor {name} holds {found}"
        exponents = context.tensors.get(_named(name, "_scale"))
        if exponents is not None and exponents.dtype == np.int8 and _any_beyond(tensor, exponents):
            return f"tensor {name} holds numbers beyond any float32"
    return None


def _named(codes: str, end: str) -> str:
    """Return the name of the scales or minima of a tensor of codes."""
    kind, _, cache = codes.partition(".")
    return f"{kind}{end}.{cache}"


def _any_beyond(codes: Array, exponents: Array) -> bool:
    """Return whether a vector of `fp8` reads back as an infinity; codes [...,n,D], exponents [...,n,1]."""
    largest = codes[exponents.view(np.uint8)[..., 0] == _LARGEST_EXPONENT]
    return bool(np.any(largest.view(np.uint8) & 0x7F >= _FIRST_BEYOND))


def _not_finite(dtype: str) -> Impossible:
    exponent = _EXPONENTS[dtype]
    return Impossible("NaN or infinities", lambda bits: np.max(bits & bits.dtype.type(exponent)) == exponent)


_SCALE = Impossible("scales that are not above 0", lambda bits: np.max(bits - np.uint16(1)) >= 0x7FFF)
_MINIMUM = Impossible("minima of -0", lambda bits: np.any(bits == 0x8000))
_OF_FORMAT: Mapping[VectorFormat, tuple[tuple[Impossible, ...], ...]] = {
    INT8: ((Impossible("code -128", lambda bits: np.min(bits.view(np.int8)) == -128),), (_SCALE,)),
    FP8: (
        (Impossible("codes of NaN", lambda bits: np.max(bits & np.uint8(0x7F)) == 0x7F),),
        (
            Impossible("NaN or infinities", lambda bits: np.any(bits == 255)),
            Impossible("exponents beyond that of any float32", lambda bits: np.max(bits) > _LARGEST_EXPONENT),
        ),
    ),
    INT4: ((), (_SCALE,), (_MINIMUM,)),
}
"""Values that codes, scales and minima never have."""


def _never_in(name: str, tensors: Mapping[str, Array]) -> Iterator[Impossible]:
    """Yield the values that a tensor never holds, by its type, its name and the scales or minima beside it."""
    dtype = tensors[name].dtype.name
    if dtype in _EXPONENTS:
        yield _not_finite(dtype)
    kind, _, cache = name.partition(".")
    ends = ("", "_scale", "_minimum")
    place = next((place for place in (2, 1) if kind.endswith(ends[place])), 0)
    codes = kind.removesuffix(ends[place])
    scales, minima = (tensors.get(_named(f"{codes}.{cache}", end)) for end in ends[1:])
    if scales is not None:
        vector = FP8 if scales.dtype == np.int8 else INT8 if minima is None else INT4
        yield from _OF_FORMAT[vector][place]


def _pieces(tensor: Array) -> Iterator[Bits]:
    """Yield the bits of all numbers, some at a time."""
    bits = np.ascontiguousarray(tensor).reshape(-1).view(f"u{tensor.dtype.itemsize}")
    count = _AT_A_TIME // bits.itemsize
    for start in range(0, len(bits), count):
        yield bits[start : start + count]
