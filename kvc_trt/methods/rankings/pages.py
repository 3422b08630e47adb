"""Bounds of pages in float64, by which hybrid attention and Quest rank, and how far rounding can move them."""

from __future__ import annotations

import numpy as np

from kvc_trt.methods.rankings.rounding import Float64, Int64
from kvc_trt.operators.fp8_bounds import raised


def bounds_of_pages(
    keys: Float64, starts: Int64, fp8: bool, lower: Float64 | float = 0.0, upper: Float64 | float = 0.0
) -> tuple[Float64, Float64]:
    """Return minima and maxima [P, r] of keys [m, r] by page, from `starts` on; in fp8 rounded outward.

    Before that `lower` is subtracted from the minima, and `upper` added to the maxima.
    """
    least, most = np.minimum.reduceat(keys, starts) - lower, np.maximum.reduceat(keys, starts) + upper
    return (-raised(-least), raised(most)) if fp8 else (least, most)


def steps_of_bounds(keys: Float64, starts: Int64, off: Float64) -> tuple[Float64, Float64]:
    """Return how far fp8 minima and maxima [P, r] of keys [m, r] can move, if they are off by `off` [P] when rounded.

    Rounding is monotone, so the ends of the interval suffice."""
    exact = bounds_of_pages(keys, starts, fp8=True)
    outward = bounds_of_pages(keys, starts, True, off[:, None], off[:, None])
    inward = bounds_of_pages(keys, starts, True, -off[:, None], -off[:, None])
    least, most = (
        np.maximum(np.abs(one - there), np.abs(one - here))
        for one, there, here in zip(exact, outward, inward, strict=True)
    )
    return least, most


def together(off: Float64, starts: Int64) -> Float64:
    """Return the root of the sum of squares over the keys of each page; off [m], first slots of pages [P]."""
    lengths: Float64 = np.sqrt(np.add.reduceat(off**2, starts))
    return lengths
