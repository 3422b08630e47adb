"""Lists ranked by softmax weights of which an executor has lost some: the proof in float64 that it may have.

Float32's normal numbers end at 2^-126. Below it some executors keep subnormal numbers and others make 0 of them, which
depends on the processor and on the library. So a list may differ from the reference's where scores are made of such
weights. Elsewhere the methods judged here are judged by equality, so nothing else is explained: for every token left
out, only the loss of its own weights counts, and only where it is enough to change the score in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvc_trt.methods.rankings.ranking import ChosenList
from kvc_trt.methods.rankings.rounding import RELATIVE_ROUNDING, SMALLEST_NORMAL, Float64, Int64

Array = NDArray[Any]
_QUERIES_AT_A_TIME = 256
_HALF_A_STEP = 2.0**-24
"""Half a rounding step of float32, relative: a smaller share of a number vanishes when it is added to it."""


@dataclass
class WeightScores:
    """Scores in float64 of the entries of one list: `first` .. `first` + n - 1."""

    first: int
    value: Float64
    """[n]"""
    lost: Float64
    """[n] the part of each that an executor may lose."""
    tolerance: float
    """Largest relative change that float32's rounding may make to a score, as in `rounding.Magnitude`."""
    identity: tuple[Float64, ...]
    """Tables [n,...]: entries that are equal in all of them are copies, which score alike in every executor."""

    @property
    def low(self) -> Float64:
        """The lowest that underflow may make of each score.

        Rounding counts beside the loss, but for no more than the loss itself."""
        lost = np.where(self.lost > _HALF_A_STEP * self.value, self.lost, 0)
        lowest: Float64 = self.value - lost - np.minimum(self.tolerance * self.value, lost)
        return lowest

    def tie(self, one: int, other: int) -> bool:
        """Tell whether two entries score the same in every executor."""
        copies = all(np.array_equal(table[one], table[other]) for table in self.identity)
        return copies or bool(self.value[one] == self.value[other])

    def refuse(self, kept: Int64, extra: Int64, missing: Int64) -> str | None:
        """Return why the entries `kept`, `extra` among them, are not the best ones; None if they may be."""
        value, low = self.value, self.low
        left = np.setdiff1d(np.arange(value.size), kept)
        worst, best = kept[value[kept].argmin()], left[low[left].argmax()]
        if not value[worst] >= low[best]:  # nor where one is no number
            lost = value[best] - low[best]
            return f"float64 scores differ by {value[best] - value[worst]:.1e}, underflow explains {lost:.1e}"
        if ((low[missing] == value[missing]) & (value[missing] > 0)).any():
            return "float64 scores are equal or nearly so, and underflow loses nothing of them"
        for taken in extra:
            if any(self.tie(int(taken), int(dropped)) for dropped in missing[missing < taken]):
                return "an exact tie, and the lower index wins"
        return None


class WeighedEntries(ABC):
    """Entries of one row, ranked by softmax weights."""

    keys: Array
    """[G,n,D]"""

    @abstractmethod
    def scores(self, head: int) -> WeightScores:
        """Return the scores of those entries of a KV head that compete."""

    def explain(self, lists: NDArray[np.integer], chosen: ChosenList) -> str | None:
        """Return why `chosen`, one of the row's `lists` [G,k], is refused although weights may be lost; None if not."""
        entries = self.keys.shape[1]
        if chosen.extra.max() >= entries:
            return f"kept position {chosen.extra.max()} of {entries} entries"
        if (problem := self.refuse_together(lists)) is not None:
            return problem
        scores = self.scores(chosen.head)
        place = chosen.missing - scores.first
        certain = chosen.missing[(place < 0) | (place >= scores.value.size)]
        if certain.size:
            return f"entry {certain[0]} always stays"
        kept = chosen.taken - scores.first
        kept = kept[(kept >= 0) & (kept < scores.value.size)]
        return chosen.instead("kept", scores.refuse(kept, chosen.extra - scores.first, place))

    def refuse_together(self, lists: NDArray[np.integer]) -> str | None:
        """Return why the lists [G,k] of a row cannot go together; None if they can."""
        return None


@dataclass
class AttendedEntries(WeighedEntries):
    """Entries of one row in text order, ranked by the attention that they received; the last `recent` always stay."""

    queries: Array
    """[H,M,D]: those that attended, of the last M entries; an entry is seen from its own query on."""
    keys: Array
    """[G,n,D]"""
    recent: int
    received: Array | None = None
    """[G,n] attention that each had received before; None: nothing."""
    of_layer: bool = False
    """True where all KV heads share one list, by the sum over all query heads."""

    @override
    def refuse_together(self, lists: NDArray[np.integer]) -> str | None:
        """Refuse lists that differ where all KV heads share one."""
        return "KV heads keep different tokens" if self.of_layer and (lists != lists[0]).any() else None

    @override
    def scores(self, head: int) -> WeightScores:
        """Score the entries before the last `recent` by the attention that the group or the layer gave them."""
        groups, entries, _ = self.keys.shape
        queries = self.queries.astype(np.float64).reshape(groups, -1, *self.queries.shape[1:])
        heads = range(groups) if self.of_layer else (head,)
        before = np.zeros(entries) if self.received is None else self.received[head].astype(np.float64)
        tolerance = RELATIVE_ROUNDING * (1 + max(magnitude(queries[g], self.keys[g]) for g in heads))
        value, lost = before.copy(), np.where(before < SMALLEST_NORMAL, before, 0)
        for g in heads:
            for query in queries[g]:
                for weights in _weights(query, self.keys[g].astype(np.float64)):
                    value += weights.sum(0)
                    lost += np.where(weights < SMALLEST_NORMAL * (1 + tolerance), weights, 0).sum(0)
        contested = entries - self.recent
        # Entries that not all queries see are unlike, even where their keys are equal.
        seen_from = np.maximum(np.arange(entries) - (entries - queries.shape[2]), 0).astype(np.float64)
        keys = self.keys[list(heads)].astype(np.float64).swapaxes(0, 1)
        identity = tuple(table[:contested] for table in (keys, before, seen_from))
        return WeightScores(0, value[:contested], lost[:contested], tolerance, identity)


def _weights(query: Float64, keys: Float64) -> Iterator[Float64]:
    """Yield the softmax weights of one head's queries [M,D], some queries at a time: [m,n] for keys [n,D]."""
    hidden = len(keys) - len(query)
    for start in range(0, len(query), _QUERIES_AT_A_TIME):
        some = query[start : start + _QUERIES_AT_A_TIME]
        logits = some @ keys.T / np.sqrt(keys.shape[1])
        visible = np.arange(len(keys)) <= hidden + start + np.arange(len(some))[:, None]
        yield softmax(np.where(visible, logits, -np.inf))


def softmax(logits: Float64) -> Float64:
    """Return the softmax weights of logits [..., n]."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    share: Float64 = weights / weights.sum(-1, keepdims=True)
    return share


def magnitude(queries: Float64, keys: NDArray[np.floating]) -> float:
    """Return M of `rounding.Magnitude` for queries [...,D], or a bound of it: lengths instead of products."""
    longest = [float(np.linalg.norm(table, axis=-1).max()) for table in (queries, keys.astype(np.float64))]
    return longest[0] * longest[1] / float(np.sqrt(keys.shape[-1]))
