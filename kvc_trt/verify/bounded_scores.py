"""Scores of prompt tokens, cached tokens and pages in float64, each with the range that rounding can move it in.

Another executor's queries and keys carry rounding of earlier layers. Each vector is taken to be off by at most
2^-22 of its own length times `slack`, in whatever direction, and a score's range is what follows from that: a product
q.x of two such vectors moves by 2^-21 |q| |x|, so two of them approach each other by 2^-20, as in `scores`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvc_trt.verify.scores import RELATIVE_ROUNDING, Float64, Int64

_SHORTEST = 1e-12
"""Smallest length by which a key is divided (`reference.keydiff`)."""
_LARGEST_EXPONENT = 600.0
"""Whose exponential is still finite, and moves a score anywhere."""


@dataclass(frozen=True)
class BoundedScores:
    """Exact scores `value` [n], and the lowest and the highest that rounding may have made of each."""

    value: Float64
    low: Float64
    high: Float64

    @classmethod
    def within(cls, value: Float64, error: Float64) -> BoundedScores:
        """Scores that may be off by `error` [n]."""
        return cls(value, value - error, value + error)

    def without_last(self) -> BoundedScores:
        """Return the scores of all but the last, which is taken whatever its score."""
        return BoundedScores(self.value[:-1], self.low[:-1], self.high[:-1])

    def unexplained(self, taken: Int64) -> str | None:
        """Why `taken`, of these scores, cannot be the best ones whatever rounding did; None if they can."""
        left = np.setdiff1d(np.arange(self.value.size), taken)
        if not left.size or not taken.size:
            return None
        worst, best = taken[self.high[taken].argmin()], left[self.low[left].argmax()]
        if self.high[worst] >= self.low[best]:
            return None
        allowed = self.high[worst] - self.value[worst] + self.value[best] - self.low[best]
        return f"float64 scores differ by {self.value[best] - self.value[worst]:.1e}, a near-tie allows {allowed:.1e}"


def scores_by_direction(keys: Float64, slack: float) -> BoundedScores:
    """KeyDiff: how far each key [n, D] of one KV head points away from the mean direction of all of them.

    A unit vector is off by twice what its key is, and so is the mean of all of them.
    """
    units = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), _SHORTEST)
    anchor = units.mean(0)
    error = _off(slack) * (1 + np.linalg.norm(anchor))
    return BoundedScores.within(-(units @ anchor), np.full(len(keys), error))


def scores_by_expected_queries(
    mean: Float64, covariance: Float64, keys: Float64, values: Float64, slack: float
) -> BoundedScores:
    """Expected Attention of one KV head: mean [g, D], covariance [g, D, D] of its queries; keys, values [n, D].

    The exponent mu.k / sqrt(D) + k.Sigma.k / 2D is an expectation over queries of length sqrt(|mu|^2 + tr Sigma). With
    a = that length times |k| / sqrt(D), and b = sqrt(k.Sigma.k / D), it moves by 2^-21 a (1 + b).
    """
    size = keys.shape[1]
    spread = np.maximum(np.einsum("nd,gde,ne->gn", keys, covariance, keys), 0) / size
    logits = mean @ keys.T / np.sqrt(size) + spread / 2
    attention = np.exp(logits - logits.max(-1, keepdims=True))
    attention /= attention.sum(-1, keepdims=True)

    lengths = np.sqrt((mean**2).sum(-1) + np.trace(covariance, axis1=1, axis2=2))
    reach = lengths[:, None] * np.linalg.norm(keys, axis=-1) / np.sqrt(size)
    moves = _off(slack) * (1 + reach * (1 + np.sqrt(spread)))
    moves += (attention * moves).sum(-1, keepdims=True)  # what all are divided by moves too
    moves = np.minimum(moves, _LARGEST_EXPONENT)

    weight = np.linalg.norm(values, axis=-1) / len(mean)
    low, exact, high = (weight * (attention * np.exp(sign * moves)).sum(0) for sign in (-1, 0, 1))
    return BoundedScores(exact, low, high)


def scores_on_channels(query: Float64, keys: Float64, channels: Int64, slack: float) -> BoundedScores:
    """SparQ's scores of the tokens of one KV head on some channels [r]: query [g, D], keys [m, D]."""
    total, part = np.abs(query).sum(-1), np.abs(query[:, channels]).sum(-1)
    share = np.where((total > 0) & (part > 0), part / np.where(total > 0, total, 1), 1.0)
    temperature = np.sqrt(keys.shape[1] * share)
    exact = ((query[:, channels] / temperature[:, None]) @ keys[:, channels].T).sum(0)
    reach = (np.linalg.norm(query, axis=-1) / temperature).sum() * np.linalg.norm(keys, axis=-1)
    return BoundedScores.within(exact, _off(slack) * reach)


def scores_of_pages(query: Float64, keys: Float64, page_size: int, slack: float) -> BoundedScores:
    """Quest's scores of the pages of one query head: query [D], keys [m, D].

    The product of the query with the farthest corner of a page; that corner's length is at least any key's.
    """
    starts = np.arange(0, len(keys), page_size)
    low, high = np.minimum.reduceat(keys, starts), np.maximum.reduceat(keys, starts)
    exact = np.maximum(query * low, query * high).sum(-1)
    reach = np.linalg.norm(query) * np.linalg.norm(np.maximum(np.abs(low), np.abs(high)), axis=-1)
    return BoundedScores.within(exact, _off(slack) * reach)


def _off(slack: float) -> float:
    """How far a product of two vectors of length 1 may be off: half of what two products may approach each other."""
    return slack * RELATIVE_ROUNDING / 2
