"""Scores of prompt tokens, cached tokens and pages in float64, each with the range that rounding can move it in.

Another executor's queries and keys carry rounding of earlier layers. Each vector is taken to be off by at most 2^-22 of
its own length times `slack`, in whatever direction, and a score's range is what follows from that to first order: a
product q.x of two such vectors moves by 2^-21 |q| |x|, so two of them approach each other by 2^-20, as in `scores`.
Scores that are made of exponentials may also be low by what underflow loses (`scores.lost_to_underflow`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice, product

import numpy as np

from kvc_trt.methods.base.isolated_runs import ByPageBounds, ByPages
from kvc_trt.verify.rankings.scores import (
    MOST_CHANNEL_CHOICES,
    RELATIVE_ROUNDING,
    ChannelChoice,
    Float64,
    Int64,
    bounds_of_pages,
    lost_to_underflow,
    truncated_share,
)

_SHORTEST = 1e-12
"""Smallest length by which a key is divided (`reference.keydiff`)."""
_LARGEST_EXPONENT = 600.0
"""Whose exponential is still finite, and moves a score anywhere."""
_MOST_SETS_LOOKED_AT = 16 * MOST_CHANNEL_CHOICES


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


def slack_of_truncation(products: int) -> float:
    """The slack that covers what tensor cores cut off sums of so many products, besides float32's.

    They lose at most a share of the sum of |q_d x_d|, which is below |q| |x|: as if x were off by that share of its
    length.
    """
    return 4 * truncated_share(products) / RELATIVE_ROUNDING


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

    The mean weight is multiplied by the value's length, and so is what underflow has taken from it; where the value is
    short, the product itself may be lost.
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

    length = np.linalg.norm(values, axis=-1)
    low, exact, high = (length / len(mean) * (attention * np.exp(sign * moves)).sum(0) for sign in (-1, 0, 1))
    return BoundedScores(exact, low - lost_to_underflow(len(mean)) * np.maximum(1, length), high)


def possible_channels(query: Float64, top_r: int, slack: float) -> Iterator[Int64]:
    """Every set of channels [r], ascending, that a query [g, D] may have had before rounding; the exact one first.

    Channels are ranked by the sum of |q| over the heads. Two channels of a vector that is off by e approach each other
    by sqrt(2) e at most. So no channel is left out that is ahead of a chosen one by more than the sum of this over the
    heads. That a vector is off by a share of its length says little of a small channel beside large ones.
    """
    weight, reach = np.abs(query).sum(0), np.sqrt(2) * _off_by(query, slack).sum()
    order = np.lexsort((np.arange(weight.size), -weight))
    ranked = weight[order]
    best_left = ranked[top_r] if top_r < ranked.size else -np.inf
    certain = ranked > best_left + reach
    contenders = order[~certain & (ranked >= ranked[top_r - 1] - reach)]

    def possible(chosen: tuple[int, ...]) -> bool:
        left = np.setdiff1d(contenders, chosen)
        return not chosen or not left.size or bool(weight[left].max() <= weight[list(chosen)].min() + reach)

    sets = islice(combinations(contenders.tolist(), top_r - int(certain.sum())), _MOST_SETS_LOOKED_AT)
    for chosen in islice(filter(possible, sets), MOST_CHANNEL_CHOICES):
        yield np.sort(np.append(order[certain], np.array(chosen, dtype=np.int64))).astype(np.int64)


def possible_choices(query: Float64, top_r: int, slack: float) -> Iterator[ChannelChoice]:
    """Every choice of channels and bounds that a query [g, D] may have made before rounding; the exact one first.

    A page's maximum is its bound where the sum of q over the heads is positive, else its minimum; each head moves that
    sum by no more than it is off.
    """
    for channels in possible_channels(query, top_r, slack):
        total = query[:, channels].sum(0)
        doubtful = np.flatnonzero(np.abs(total) <= _off_by(query, slack).sum())
        for flips in islice(product((False, True), repeat=len(doubtful)), MOST_CHANNEL_CHOICES):
            rising = total > 0
            rising[doubtful] ^= np.array(flips, dtype=bool)
            yield ChannelChoice(channels, rising)


def scores_on_channels(query: Float64, keys: Float64, channels: Int64, slack: float) -> BoundedScores:
    """SparQ's scores of the tokens of one KV head on some channels [r]: query [g, D], keys [m, D].

    The sum over the heads of s = q.x / T. With e and f for how far q and x are off, it moves by the sum over the heads
    of e |slope of s in q|, and by f |sum over the heads of q / T on the channels|.
    """
    used, heads = keys[:, channels], [_OnChannels(q, channels) for q in query]
    logits = [head.logits(used) for head in heads]
    moves = np.linalg.norm(sum(head.direction for head in heads)) * _off_by(keys, slack)
    for head, s, e in zip(heads, logits, _off_by(query, slack), strict=True):
        moves += e * head.slopes(used, s)
    return BoundedScores.within(np.sum(logits, axis=0), moves)


def scores_of_page_tokens(
    query: Float64, keys: Float64, pages: ByPages, choice: ChannelChoice, slack: float
) -> BoundedScores:
    """Scores [m] of tokens by their pages in hybrid attention (RocketKV, stage 2): query [g, D], keys [m, D].

    A head's score of page p is exp(s(p)) over the sum of exp(s) of all tokens, where s = q.b / T and b is the page's
    bound on the channels. With e and f for how far q and a key are off, the score's logarithm moves as s(p) does
    against the mean of all s, weighted by the attention A(j) that each page j has:

    - by the query: e |slope in q of s(p) - sum of A(j) s(j)|. What all pages share cancels out here;
    - by the keys: U(p) + sum of A(j) U(j), with U = |q / T on the channels| sqrt(sum of f^2 over the page's keys): a
      maximum moves on each channel by no more than some key of the page does. Bounds in fp8 may move by a step of fp8:
      U is then the sum over the channels of |q / T| times how far the rounded bound moves (`_steps_of_bounds`);
    - and the logarithm of a mean of exponentials exceeds their mean exponent by at most half the largest's square.
    """
    starts = np.arange(0, len(keys), pages.page_size)
    sizes = np.minimum(pages.page_size, len(keys) - starts)
    used = keys[:, choice.channels]
    least, most = bounds_of_pages(used, starts, pages.fp8_bounds)
    bound = np.where(choice.take_maximum, most, least)
    tables, keys_off = np.zeros((3, len(starts))), _together(_off_by(keys, slack), starts)
    steps = np.where(choice.take_maximum, *_steps_of_bounds(used, starts, keys_off)[::-1]) if pages.fp8_bounds else None
    for q, e in zip(query, _off_by(query, slack), strict=True):
        head = _OnChannels(q, choice.channels)
        logits = head.logits(bound)
        score = np.exp(logits - logits.max())
        score /= score @ sizes
        share = score * sizes
        by_query = e * head.slopes(bound - share @ bound, logits - share @ logits)
        by_keys = np.linalg.norm(head.direction) * keys_off if steps is None else steps @ np.abs(head.direction)
        moves = by_query + by_keys + share @ by_keys + (by_query + by_keys).max() ** 2 / 2
        moves = np.minimum(moves, _LARGEST_EXPONENT)
        tables += score * np.exp([np.zeros(len(starts)), -moves, moves]) / len(query)
    tables[1] -= lost_to_underflow(len(query))
    return BoundedScores(*(np.repeat(table, pages.page_size)[: len(keys)] for table in tables))


def scores_of_pages(query: Float64, keys: Float64, pages: ByPageBounds, slack: float) -> BoundedScores:
    """Quest's scores of the pages of one query head: query [D], keys [m, D].

    The product of the query with the farthest corner of a page. With e and f for how far q and a key are off, it moves
    by e |corner| + |q| sqrt(sum of f^2 over the page's keys): on each channel the corner moves by no more than some key
    of the page does. In fp8 it moves on each channel by as much as the rounded bound (`_steps_of_bounds`).
    """
    starts = np.arange(0, len(keys), pages.page_size)
    low, high = bounds_of_pages(keys, starts, pages.fp8_bounds)
    exact = np.maximum(query * low, query * high).sum(-1)
    corner = np.linalg.norm(np.maximum(np.abs(low), np.abs(high)), axis=-1)
    keys_off = _together(_off_by(keys, slack), starts)
    if pages.fp8_bounds:
        by_keys = np.maximum(*_steps_of_bounds(keys, starts, keys_off)) @ np.abs(query)
    else:
        by_keys = np.linalg.norm(query) * keys_off
    return BoundedScores.within(exact, _off_by(query, slack) * corner + by_keys)


def _steps_of_bounds(keys: Float64, starts: Int64, off: Float64) -> tuple[Float64, Float64]:
    """How far fp8 minima and maxima [P, r] can move if those of keys [m, r] before rounding are off by `off` [P].

    Rounding ascends with what is rounded, so the ends of the interval say it."""
    exact = bounds_of_pages(keys, starts, fp8=True)
    outward = bounds_of_pages(keys, starts, True, off[:, None], off[:, None])
    inward = bounds_of_pages(keys, starts, True, -off[:, None], -off[:, None])
    least, most = (
        np.maximum(np.abs(one - there), np.abs(one - here))
        for one, there, here in zip(exact, outward, inward, strict=True)
    )
    return least, most


class _OnChannels:
    """A head's query [D] on some channels: logits s = q.x / T of vectors x, where T^2 is D times their share of |q|."""

    def __init__(self, query: Float64, channels: Int64) -> None:
        on_channels = query[channels]
        total, part = np.abs(query).sum(), np.abs(on_channels).sum()
        self._temperature = np.sqrt(query.size * (part / total if part > 0 else 1.0))
        self._inside = np.sign(on_channels) * (1 / part - 1 / total if part > 0 else 0.0)
        self._outside = np.sqrt(query.size - channels.size) / total if part > 0 else 0.0
        self.direction: Float64 = on_channels / self._temperature
        """q / T on these channels, [r]."""

    def logits(self, vectors: Float64) -> Float64:
        """Return s [n] of vectors [n, r]."""
        found: Float64 = vectors @ self.direction
        return found

    def slopes(self, vectors: Float64, logits: Float64) -> Float64:
        """Return the lengths [n] of the slopes in q, on all channels, of differences of logits.

        A slope is x / T - s times that of ln T: half of 1 / (sum of |q| on the channels) - 1 / (sum of all |q|) on the
        channels, with the sign of q, and half of -1 / (sum of all |q|) on the others.
        """
        inside = vectors / self._temperature - np.outer(logits / 2, self._inside)
        lengths: Float64 = np.sqrt((inside**2).sum(-1) + (logits / 2 * self._outside) ** 2)
        return lengths


def _together(off: Float64, starts: Int64) -> Float64:
    """The root of the sum of squares over the keys of each page; off [m], first slots of pages [P]."""
    lengths: Float64 = np.sqrt(np.add.reduceat(off**2, starts))
    return lengths


def _off_by(vectors: Float64, slack: float) -> Float64:
    """How far vectors [..., D] are taken to be off."""
    lengths: Float64 = slack * RELATIVE_ROUNDING / 4 * np.linalg.norm(vectors, axis=-1)
    return lengths


def _off(slack: float) -> float:
    """How far a product of two vectors of length 1 may be off: half of what two products may approach each other."""
    return slack * RELATIVE_ROUNDING / 2
