"""How far an operator's arithmetic was off, where its output's own rounding is coarser than the bar on it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FORGIVEN = ("bfloat16",)
"""Types whose own rounding, half a spacing or 2^-8 relative, exceeds the bar on operator outputs: a right result would
fail it. float16's is 2^-11, and stays inside of the bar. (docs/decisions/0012)"""


def differences(found: Array, expected: Array) -> Array:
    """What each element is off before its result was rounded, float64; NaN where either is.

    Of a type in FORGIVEN the distance from `expected` to the nearest number that rounds to `found`, so that a correctly
    rounded result has none and an error in front of the rounding is seen whole. Else the plain absolute difference.
    """
    here, wanted = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if found.dtype.name not in FORGIVEN:
            return np.abs(here - wanted)
        above, below = (np.nextafter(found, np.array(end, found.dtype)).astype(np.float64) for end in (np.inf, -np.inf))
        off: Array = np.maximum((below + here) / 2 - wanted, wanted - (here + above) / 2)
    return np.maximum(off, 0.0)
