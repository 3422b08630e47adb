"""Keys or values of a cache as arrays: the vectors themselves, or the parts of a format, and how they are read back.

The bits are those of `reference/stored.py`; here they are made without PyTorch, for code that moves or edits state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.cache_formats import FP8, CacheFormat, VectorFormat
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators.schema import Tensor, part_names, vector_of

Array = NDArray[Any]

_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)
"""The power of two that each byte of an exponent stands for."""


@dataclass(frozen=True)
class CachedVectors:
    """Keys or values of many tokens, [...,D]."""

    parts: tuple[Array, ...]
    """The vectors [...,D], or codes, scales, and minima where the format has them."""
    format: VectorFormat | None = None

    def map(self, change: Callable[[Array], Array]) -> CachedVectors:
        """Apply `change` to every part and return the result: a choice of tokens, never of channels."""
        return replace(self, parts=tuple(change(part) for part in self.parts))

    def codes(self) -> Array:
        """Return the vectors if they are exact, else their codes INT8 [...,D], one for each channel."""
        codes = self.parts[0]
        if self.format is None or self.format.code_bits == 8:
            return codes
        packed = codes.view(np.uint8)
        pairs = np.stack([packed & 15, packed >> 4], axis=-1)
        return pairs.reshape(*packed.shape[:-1], -1).view(np.int8)

    def values(self) -> Array:
        """Return the vectors as they are read: in their own type if they are exact, else float32."""
        if self.format is None:
            return self.parts[0]
        codes, scales = self.codes(), self.parts[1]
        if self.format == FP8:
            exact = codes.view(numpy_dtype("float8_e4m3fn")).astype(np.float32)
            with np.errstate(over="ignore"):  # beside the largest float32, codes are rounded up
                return np.asarray(exact * _POWERS[scales.view(np.uint8)])
        grouped = codes.reshape(*scales.shape, -1).astype(np.float32)
        grouped *= scales[..., None]
        if self.format.grouped:
            grouped += self.parts[2][..., None]
        return grouped.reshape(codes.shape)


def cached_vectors(state: Mapping[str, Array], tensor: Tensor, form: CacheFormat) -> CachedVectors:
    """Return the vectors of one of a cache's tensors, given the arrays of its state by name."""
    vector = vector_of(tensor, form)
    return CachedVectors(tuple(state[name] for name in part_names(tensor, vector)), vector)
