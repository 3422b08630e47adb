"""Measure the errors of an executor's arrays against those of the reference."""

from __future__ import annotations

import numpy as np

from kvc_trt.backends.harness import Array

FORGIVEN = ("bfloat16",)
"""Types whose own rounding, half a spacing or 2^-8 relative, exceeds the bar on operator outputs: a right result would
fail it. float16's is 2^-11, and stays inside of the bar. (docs/decisions/0012)"""


def maximum_error(found: Array, expected: Array) -> float:
    """Return the largest error, divided by the largest expected magnitude (at least 1); NaN if anything is NaN.

    The error of a bfloat16 output is that before it was rounded (`differences`).
    """
    if not expected.size:
        return 0.0
    scale = max(1.0, float(np.abs(expected).max()))
    return float(differences(found, expected).max() / scale)


def differences(found: Array, expected: Array) -> Array:
    """Return the error of each element before it was rounded, float64; NaN where either is NaN.

    For a type in FORGIVEN this is the distance from `expected` to the nearest number that rounds to `found`: a
    correctly rounded result has the error 0, and an error made before the rounding counts in full. For other types it
    is the plain absolute difference.
    """
    here, wanted = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if found.dtype.name not in FORGIVEN:
            return np.abs(here - wanted)
        above, below = (np.nextafter(found, np.array(end, found.dtype)).astype(np.float64) for end in (np.inf, -np.inf))
        off: Array = np.maximum((below + here) / 2 - wanted, wanted - (here + above) / 2)
    return np.maximum(off, 0.0)


def exact(found: Array, expected: Array) -> float:
    """Return the largest absolute difference; infinity if shapes differ or anything is NaN."""
    if found.shape != expected.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    worst = float(difference.max()) if difference.size else 0.0
    return float("inf") if np.isnan(worst) else worst


def larger(one: float, other: float) -> float:
    """Return the maximum of two numbers; NaN if either is NaN, so that a NaN is never hidden."""
    return float(np.maximum(one, other))
