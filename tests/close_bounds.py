"""The comparison of the fp8 bounds of two executors whose keys differ by rounding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvc_trt.operators.fp8_bounds import values_of


def may_be_of_close(codes: NDArray[np.int8], others: NDArray[np.int8], tolerance: float) -> bool:
    """Return True if codes of one shape can be rounded from numbers that differ by at most `tolerance`."""
    every = values_of(np.arange(256, dtype=np.uint8).view(np.int8))
    numbers = np.unique(every[np.isfinite(every)])
    one, other = values_of(codes), values_of(others)
    below = numbers[np.maximum(np.searchsorted(numbers, np.maximum(one, other)) - 1, 0)]
    return bool((below - np.minimum(one, other) <= tolerance).all())
