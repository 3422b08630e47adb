"""Scores on a query's largest channels, which SparQ gives to tokens and hybrid attention to pages: float64 bounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, islice

import numpy as np

from kvc_trt.methods.rankings.rounding import Float64, Int64, off_by

MOST_CHANNEL_CHOICES = 256
"""Most sets of channels, and of their bounds, that are tried for one list."""
_MOST_SETS_LOOKED_AT = 16 * MOST_CHANNEL_CHOICES


def possible_channels(query: Float64, top_r: int, slack: float) -> Iterator[Int64]:
    """Yield every set of channels [r], ascending, that a query [g, D] may have had before rounding.

    The exact one comes first.

    Channels are ranked by the sum of |q| over the heads. Two channels of a vector that is off by e approach each other
    by sqrt(2) e at most. So no channel is left out that is ahead of a chosen one by more than the sum of this over the
    heads. That a vector is off by a share of its length says little of a small channel beside large ones.
    """
    weight, reach = np.abs(query).sum(0), np.sqrt(2) * off_by(query, slack).sum()
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


class OnChannels:
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
