"""Bounds on the error of a score: float32's rounding, that of tensor cores, and underflow.

A method's ranking computes its scores once more in float64, apart from the reference on purpose, and with these bounds
it proves or refuses a near-tie. Such proofs run only where two executors chose differently, so they may be slow.

Another executor's queries and keys carry rounding of earlier layers. Each vector is taken to be off by at most 2^-22 of
its own length times `slack`, in any direction, and a score's range follows from that to first order: a product q.x of
two such vectors moves by 2^-21 |q| |x|, so two of them approach each other by 2^-20. Scores made of exponentials may
also be too low because of underflow (`lost_to_underflow`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

RELATIVE_ROUNDING = 2.0**-20
SMALLEST_NORMAL = 2.0**-126
"""The smallest normal float32. Below it an executor may round to fixed steps of 2^-149, or to 0."""
LARGEST_EXPONENT = 600.0
"""An exponent whose exponential is still finite, and moves a score anywhere."""
_PRODUCTS_AT_A_TIME = 8


def lost_to_underflow(weights: int) -> float:
    """Return the most that a sum of this many softmax weights, or their mean, may lose below float32's normal range.

    An executor may make 0 of any number below 2^-126: of an exponential, of a weight (which is no larger, since the
    largest exponential is 1), of a part of the sum, or of the mean. A weight can be lost only once, in any order, and
    where it is lost, its share of the result is below 2^-126: dividing by the number of weights comes after that, or
    makes the share smaller before. Where subnormal numbers are kept, rounding to steps of 2^-149 moves less.
    """
    return weights * SMALLEST_NORMAL


def truncated_share(products: int) -> float:
    """Return the largest share of its sum of magnitudes that a sum of 16-bit products may lose on tensor cores.

    They take a few exact products and the sum so far at a time (8 on sm_80, 16 on sm_90 and sm_100), cut each to the
    last of 24 bits of the largest, add, and cut the sum to 24 bits. Later chips keep some bits more for the cuts before
    the addition; the bound counts on none. A cut loses less than 2^-23 of the largest term, which no sum of magnitudes
    is below; there is one for each product and two for each time. Sources: Fasi, Higham, Mikaitis and Pranesh,
    "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021; Khattak and Mikaitis, "Accurate
    Models of NVIDIA Tensor Cores", arXiv 2512.07004, 2025.
    """
    return (products + 2 * -(-products // _PRODUCTS_AT_A_TIME)) * 2.0**-23


def slack_of_truncation(products: int) -> float:
    """Return the slack that covers the bits that tensor cores cut off sums of this many products, besides float32's.

    They lose at most a share of the sum of |q_d x_d|, which is below |q| |x|: as if x were off by that share of its
    length.
    """
    return 4 * truncated_share(products) / RELATIVE_ROUNDING


def off_by(vectors: Float64, slack: float) -> Float64:
    """Return how far vectors [..., D] are taken to be off."""
    lengths: Float64 = slack * RELATIVE_ROUNDING / 4 * np.linalg.norm(vectors, axis=-1)
    return lengths


def off(slack: float) -> float:
    """Return how far a product of two vectors of length 1 may be off: half of how far two products may approach."""
    return slack * RELATIVE_ROUNDING / 2


class Magnitude:
    """The bounds on scores whose logits are sums of `products` products of largest magnitude `magnitude`."""

    magnitude: float
    products: int

    @property
    def tolerance(self) -> float:
        """Largest relative difference that float32 rounding explains: 2^-20 (1+M), M = max over heads of sum|q.x|/T."""
        return RELATIVE_ROUNDING * (1 + self.magnitude)

    @property
    def truncation(self) -> float:
        """Largest relative difference of two scores that tensor cores explain in addition, where they sum the logits.

        A logit is off by d at most; so is the logarithm of its weight, and that of a head's sum of weights. Hence a
        score is off by a factor of at most exp(2d), and two scores by one of exp(4d).
        """
        return float(np.expm1(4 * truncated_share(self.products) * self.magnitude))

    def allowed(self, *, truncates: bool, slack: float = 1.0) -> float:
        """Return the largest relative difference of two scores that is a near-tie."""
        return slack * self.tolerance + (self.truncation if truncates else 0.0)


def outside_tolerance(extra: Float64, missing: Float64, tolerance: float, lost: float) -> str | None:
    """Say so if scores differ by more than `tolerance` of the highest and `lost` to underflow."""
    highest = max(extra.max(), missing.max())
    gap = highest - min(extra.min(), missing.min())
    if gap <= tolerance * highest + lost:
        return None
    return f"float64 scores differ by {gap / highest:.1e} relative, a near-tie allows {tolerance + lost / highest:.1e}"


@dataclass(frozen=True)
class BoundedScores:
    """Exact scores `value` [n], and the lowest and the highest that rounding may have made of each."""

    value: Float64
    low: Float64
    high: Float64

    @classmethod
    def within(cls, value: Float64, error: Float64) -> BoundedScores:
        """Take scores that may be off by `error` [n]."""
        return cls(value, value - error, value + error)

    def without_last(self) -> BoundedScores:
        """Return the scores of all but the last, which is taken whatever its score."""
        return self.first(self.value.size - 1)

    def first(self, count: int) -> BoundedScores:
        """Return the first scores: the others belong to tokens that are taken in any case."""
        return BoundedScores(self.value[:count], self.low[:count], self.high[:count])

    def unexplained(self, taken: Int64) -> str | None:
        """Return why `taken`, of these scores, cannot be the best ones whatever rounding did; None if they can."""
        left = np.setdiff1d(np.arange(self.value.size), taken)
        if not left.size or not taken.size:
            return None
        worst, best = taken[self.high[taken].argmin()], left[self.low[left].argmax()]
        if self.high[worst] >= self.low[best]:
            return None
        allowed = self.high[worst] - self.value[worst] + self.value[best] - self.low[best]
        return f"float64 scores differ by {self.value[best] - self.value[worst]:.1e}, a near-tie allows {allowed:.1e}"
