"""Lists ranked by softmax weights of which an executor has lost some: the proof in float64 that it may have.

Float32's normal numbers end at 2^-126. Below it some executors keep subnormal numbers and others make 0 of them, which
depends on the processor and on the library. So a list may differ from the reference's where scores are made of such
weights. Elsewhere the methods judged here are judged by equality, so nothing else is explained: of every token that was
left, only what its own weights can lose counts, and only where it is enough to change the score in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvc_trt.methods.base.isolated_runs import AttendedEntries, ExpectedEntries, Weighed
from kvc_trt.verify.rankings.near_ties import Difference, few
from kvc_trt.verify.rankings.scores import RELATIVE_ROUNDING, SMALLEST_NORMAL, Float64, Int64

_QUERIES_AT_A_TIME = 256
_HALF_A_STEP = 2.0**-24
"""Of float32, relative: what is smaller beside a number vanishes in their sum."""


@dataclass
class _Scores:
    """Scores in float64 of the entries of one list: `first` .. `first` + n - 1."""

    first: int
    value: Float64
    """[n]"""
    lost: Float64
    """[n] the part of each that an executor may lose."""
    tolerance: float
    """What float32's rounding may do to a score, relative, as in `near_ties`."""
    identity: tuple[Float64, ...]
    """Tables [n,...]: entries that are equal in all of them are copies, which score alike in every executor."""

    @property
    def low(self) -> Float64:
        """The lowest that underflow may make of each score.

        Beside what is lost, rounding counts, but for no more than that."""
        lost = np.where(self.lost > _HALF_A_STEP * self.value, self.lost, 0)
        lowest: Float64 = self.value - lost - np.minimum(self.tolerance * self.value, lost)
        return lowest

    def tie(self, one: int, other: int) -> bool:
        """Whether two entries score the same in every executor."""
        copies = all(np.array_equal(table[one], table[other]) for table in self.identity)
        return copies or bool(self.value[one] == self.value[other])


def unexplained(ranked: Weighed, found: NDArray[np.integer], head: int, difference: Difference) -> str | None:
    """Why list `head` of `found` [G,k] is not the reference's with weights lost to underflow; None if it may be."""
    entries = ranked.keys.shape[1]
    if difference.extra.max() >= entries:
        return f"kept position {difference.extra.max()} of {entries} entries"
    if isinstance(ranked, AttendedEntries):
        if ranked.of_layer and (found != found[0]).any():
            return "KV heads keep different tokens"
        scores = _received(ranked, head)
    else:
        scores = _expected(ranked, head)
    place = difference.missing - scores.first
    certain = difference.missing[(place < 0) | (place >= scores.value.size)]
    if certain.size:
        return f"entry {certain[0]} always stays"
    kept = found[head][found[head] >= 0].astype(np.int64) - scores.first
    kept = kept[(kept >= 0) & (kept < scores.value.size)]
    problem = _not_the_best(scores, kept, difference.extra - scores.first, place)
    return None if problem is None else f"kept {few(difference.extra)} instead of {few(difference.missing)}: {problem}"


def _not_the_best(scores: _Scores, kept: Int64, extra: Int64, missing: Int64) -> str | None:
    value, low = scores.value, scores.low
    left = np.setdiff1d(np.arange(value.size), kept)
    worst, best = kept[value[kept].argmin()], left[low[left].argmax()]
    if not value[worst] >= low[best]:  # nor where one is no number
        lost = value[best] - low[best]
        return f"float64 scores differ by {value[best] - value[worst]:.1e}, underflow explains {lost:.1e}"
    if ((low[missing] == value[missing]) & (value[missing] > 0)).any():
        return "float64 scores are equal or nearly so, and underflow loses nothing of them"
    for taken in extra:
        if any(scores.tie(int(taken), int(dropped)) for dropped in missing[missing < taken]):
            return "an exact tie, and the lower index wins"
    return None


def _received(ranked: AttendedEntries, head: int) -> _Scores:
    """Score the entries before the last `recent` by the attention that they received, in the group or in the layer."""
    groups, entries, _ = ranked.keys.shape
    queries = ranked.queries.astype(np.float64).reshape(groups, -1, *ranked.queries.shape[1:])
    heads = range(groups) if ranked.of_layer else (head,)
    before = np.zeros(entries) if ranked.received is None else ranked.received[head].astype(np.float64)
    magnitude = max(_magnitude(queries[g], ranked.keys[g]) for g in heads)
    tolerance = RELATIVE_ROUNDING * (1 + magnitude)
    value, lost = before.copy(), np.where(before < SMALLEST_NORMAL, before, 0)
    for g in heads:
        for query in queries[g]:
            for weights in _weights(query, ranked.keys[g].astype(np.float64)):
                value += weights.sum(0)
                lost += np.where(weights < SMALLEST_NORMAL * (1 + tolerance), weights, 0).sum(0)
    contested = entries - ranked.recent
    # Entries that not all queries see are unlike, even where their keys are equal.
    seen_from = np.maximum(np.arange(entries) - (entries - queries.shape[2]), 0).astype(np.float64)
    keys = ranked.keys[list(heads)].astype(np.float64).swapaxes(0, 1)
    identity = tuple(table[:contested] for table in (keys, before, seen_from))
    return _Scores(0, value[:contested], lost[:contested], tolerance, identity)


def _weights(query: Float64, keys: Float64) -> Iterator[Float64]:
    """Yield the softmax weights of one head's queries [M,D], some queries at a time: [m,n] for keys [n,D]."""
    hidden = len(keys) - len(query)
    for start in range(0, len(query), _QUERIES_AT_A_TIME):
        some = query[start : start + _QUERIES_AT_A_TIME]
        logits = some @ keys.T / np.sqrt(keys.shape[1])
        visible = np.arange(len(keys)) <= hidden + start + np.arange(len(some))[:, None]
        yield _softmax(np.where(visible, logits, -np.inf))


def _expected(ranked: ExpectedEntries, head: int) -> _Scores:
    """Score the entries after the sinks by the attention of expected queries, times the lengths of their values.

    A head's weight is divided by their number and multiplied by that length, in whatever order: it is lost if it is
    too small anywhere.
    """
    keys, values = (table[head, ranked.sinks :].astype(np.float64) for table in (ranked.keys, ranked.values))
    of_group = slice(head * len(ranked.mean) // len(ranked.keys), (head + 1) * len(ranked.mean) // len(ranked.keys))
    mean, covariance = (table[of_group].astype(np.float64) for table in (ranked.mean, ranked.covariance))
    size, heads = keys.shape[1], len(mean)
    spread = np.einsum("nd,gde,ne->gn", keys, covariance, keys) / (2 * size)
    shares = _softmax(mean @ keys.T / np.sqrt(size) + spread) / heads
    length = np.linalg.norm(values, axis=-1)
    of_spread = float(np.linalg.norm(covariance, axis=(1, 2)).max() * (keys**2).sum(-1).max()) / (2 * size)
    tolerance = RELATIVE_ROUNDING * (1 + _magnitude(mean, keys) + of_spread)
    is_small = shares * np.minimum(1, length) < SMALLEST_NORMAL * (1 + tolerance)
    scores, lost = (table.sum(0) * length for table in (shares, np.where(is_small, shares, 0)))
    return _Scores(ranked.sinks, scores, lost, tolerance, (keys, values))


def _softmax(logits: Float64) -> Float64:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    share: Float64 = weights / weights.sum(-1, keepdims=True)
    return share


def _magnitude(queries: Float64, keys: NDArray[np.floating]) -> float:
    """Return M of the tolerance of `near_ties` for queries [...,D], or a bound of it: lengths instead of products."""
    longest = [float(np.linalg.norm(table, axis=-1).max()) for table in (queries, keys.astype(np.float64))]
    return longest[0] * longest[1] / float(np.sqrt(keys.shape[-1]))
