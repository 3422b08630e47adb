"""Both selection rules once more, in float64 and for one row and one KV head: the judge of a disagreement.

Written apart from the reference on purpose. It runs only where two executors chose differently, so it may be slow, and
it returns the magnitudes that bound what float32 rounding can do to a score.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice, product

import numpy as np
from numpy.typing import NDArray

from kvc_trt.operators.fp8_bounds import raised

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

RELATIVE_ROUNDING = 2.0**-20
SMALLEST_NORMAL = 2.0**-126
"""Of float32. Below it an executor may round to fixed steps of 2^-149, or to 0."""
_PRODUCTS_AT_A_TIME = 8
MOST_CHANNEL_CHOICES = 256
"""Most sets of channels, and of their bounds, that are tried for one list."""


def lost_to_underflow(weights: int) -> float:
    """Most that a sum of so many softmax weights, or their mean, may lose below float32's normal range.

    An executor may make 0 of any number below 2^-126: of an exponential, of a weight (which is no larger, since the
    largest exponential is 1), of a part of the sum, or of the mean. A weight can be lost only once, whatever the order,
    and where it is lost, its share of the result is below 2^-126: dividing by the number of weights comes after that,
    or makes the share smaller before. Where subnormal numbers are kept, rounding to steps of 2^-149 moves less.
    """
    return weights * SMALLEST_NORMAL


def truncated_share(products: int) -> float:
    """Largest share of its sum of magnitudes that a sum of 16-bit products may lose on tensor cores.

    They take a few exact products and the sum so far at a time (8 on sm_80, 16 on sm_90 and sm_100), cut each to the
    last of 24 bits of the largest, add, and cut the sum to 24 bits. Later chips keep some bits more for the cuts before
    the addition; the bound counts on none. A cut loses less than 2^-23 of the largest term, which no sum of magnitudes
    is below; there is one for each product and two for each time. Sources: Fasi, Higham, Mikaitis and Pranesh,
    "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021; Khattak and Mikaitis, "Accurate
    Models of NVIDIA Tensor Cores", arXiv 2512.07004, 2025.
    """
    return (products + 2 * -(-products // _PRODUCTS_AT_A_TIME)) * 2.0**-23


class _Magnitude:
    """What rounding can do to scores whose logits are sums of `products` products of largest magnitude `magnitude`."""

    magnitude: float
    products: int

    @property
    def tolerance(self) -> float:
        """Largest relative difference that float32 rounding explains: 2^-20 (1+M)."""
        return RELATIVE_ROUNDING * (1 + self.magnitude)

    @property
    def truncation(self) -> float:
        """Largest relative difference of two scores that tensor cores explain in addition, where they sum the logits.

        A logit is off by d at most; so is the logarithm of its weight, and that of a head's sum of weights. Hence a
        score is off by a factor of at most exp(2d), and two scores by one of exp(4d).
        """
        return float(np.expm1(4 * truncated_share(self.products) * self.magnitude))


@dataclass(frozen=True)
class ExactPromptScores(_Magnitude):
    """Stage 1 before the window: `summed` [n-W] and `pooled` [n-W]; `magnitude` is M of the tolerance 2^-20 (1+M).

    `underflow` is what a score may lose below float32's normal range, in whatever executor.
    """

    summed: Float64
    pooled: Float64
    magnitude: float
    products: int
    underflow: float


def prompt_scores(q_window: Float64, keys: Float64, pool_kernel: int) -> ExactPromptScores:
    """Scores of prompt eviction for one KV head (RocketKV, stage 1).

    q_window [g, W, D]: the last W queries of the group; keys [n, D]: the row's prompt, padding removed.
    Queries before position 0 (a prompt shorter than the window) are dropped.
    """
    n, head_size = keys.shape
    window = min(q_window.shape[1], n)
    queries = q_window[:, q_window.shape[1] - window :]

    logits = queries @ keys.T / np.sqrt(head_size)
    future = np.arange(n) > (n - window + np.arange(window))[:, None]
    weights = np.exp(np.where(future, -np.inf, logits - np.where(future, -np.inf, logits).max(-1, keepdims=True)))
    weights /= weights.sum(-1, keepdims=True)
    summed = weights[:, :, : n - window].sum(axis=(0, 1))

    magnitude = float((np.abs(queries) @ np.abs(keys).T).max() / np.sqrt(head_size))
    underflow = lost_to_underflow(weights.shape[0] * window)
    return ExactPromptScores(summed, _max_pool(summed, pool_kernel), magnitude, head_size, underflow)


def _max_pool(values: Float64, kernel: int) -> Float64:
    if not values.size:
        return values
    padded = np.pad(values, kernel // 2, constant_values=-np.inf)
    pooled: Float64 = np.lib.stride_tricks.sliding_window_view(padded, kernel).max(-1)
    return pooled


@dataclass(frozen=True)
class ChannelChoice:
    """Channels that score the pages, and per channel whether the page's maximum (else its minimum) is read."""

    channels: Int64
    take_maximum: NDArray[np.bool_]


def channel_choices(query: Float64, top_r: int) -> Iterator[ChannelChoice]:
    """Every choice of channels and bounds that float32 may have made for `query` [g, D]; the exact choice first.

    A sum of q that is 0 to 2^-20 has either sign.
    """
    for channels in _channel_sets(query, top_r):
        yield from _sign_choices(query, channels)


def _channel_sets(query: Float64, top_r: int) -> Iterator[Int64]:
    """Every set of channels [r], ascending, that float32 may have chosen for `query` [g, D]; the exact one first.

    Channels whose sum of |q| equals the cut to 2^-20 may be swapped. Channels with the same |q| in every head are exact
    copies: the lower index wins among them.
    """
    weight = np.abs(query).sum(0)
    order = np.lexsort((np.arange(weight.size), -weight))
    cut = weight[order[top_r - 1]]
    close = np.abs(weight - cut) <= RELATIVE_ROUNDING * cut
    certain = np.flatnonzero((weight > cut) & ~close)
    contenders = [int(d) for d in order if close[d]]

    alternatives = combinations(contenders, top_r - certain.size)
    for chosen in islice(alternatives, MOST_CHANNEL_CHOICES):
        if not _skips_a_copy(query, contenders, chosen):
            yield np.sort(np.concatenate([certain, np.array(chosen, dtype=np.int64)])).astype(np.int64)


def _skips_a_copy(query: Float64, contenders: list[int], chosen: tuple[int, ...]) -> bool:
    """Whether a chosen channel has an unchosen, exactly equal one below it."""
    magnitudes = np.abs(query)
    left = [d for d in contenders if d not in chosen]
    return any(d < taken and np.array_equal(magnitudes[:, d], magnitudes[:, taken]) for taken in chosen for d in left)


def _sign_choices(query: Float64, channels: Int64) -> Iterator[ChannelChoice]:
    total, weight = query[:, channels].sum(0), np.abs(query[:, channels]).sum(0)
    # The sign of a sum of two given terms is exact, whatever their order.
    inexact = len(query) > 2
    doubtful = np.flatnonzero((np.abs(total) <= RELATIVE_ROUNDING * weight) & (weight > 0) & inexact)
    exact = total > 0
    for flips in islice(product((False, True), repeat=len(doubtful)), MOST_CHANNEL_CHOICES):
        signs = exact.copy()
        signs[doubtful] ^= np.array(flips, dtype=bool)
        yield ChannelChoice(channels, signs)


@dataclass(frozen=True)
class PageScores(_Magnitude):
    """Stage 2: `token_weight` [pages] is f of every token of a page; the others are as in `ExactPromptScores`."""

    token_weight: Float64
    magnitude: float
    products: int
    underflow: float


def bounds_of_pages(
    keys: Float64, starts: Int64, fp8: bool, lower: Float64 | float = 0.0, upper: Float64 | float = 0.0
) -> tuple[Float64, Float64]:
    """Minima and maxima [P, r] of keys [m, r] by page, from `starts` on; in fp8 rounded outward.

    Before that `lower` is subtracted from the minima, and `upper` added to the maxima.
    """
    least, most = np.minimum.reduceat(keys, starts) - lower, np.maximum.reduceat(keys, starts) + upper
    return (-raised(-least), raised(most)) if fp8 else (least, most)


def page_scores(
    query: Float64, keys: Float64, page_size: int, choice: ChannelChoice, *, fp8_bounds: bool = False
) -> PageScores:
    """Scores of one KV head in hybrid attention (RocketKV, stage 2): query [g, D]; keys [m, D] with the current one."""
    starts = np.arange(0, len(keys), page_size)
    sizes = np.minimum(page_size, len(keys) - starts)
    used = keys[:, choice.channels]
    minimum, maximum = bounds_of_pages(used, starts, fp8_bounds)
    bound = np.where(choice.take_maximum, maximum, minimum)
    q = query[:, choice.channels]

    total, part = np.abs(query).sum(-1), np.abs(q).sum(-1)
    coverage = np.where((total > 0) & (part > 0), part / np.where(total > 0, total, 1), 1.0)
    temperature = np.sqrt(keys.shape[1] * coverage)[:, None]

    logits = q @ bound.T / temperature
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= (weights * sizes).sum(-1, keepdims=True)
    magnitude = float((np.abs(q) @ np.abs(bound).T / temperature).max())
    return PageScores(weights.mean(0), magnitude, choice.channels.size, lost_to_underflow(len(query)))
