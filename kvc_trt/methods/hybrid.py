"""Hybrid attention: RocketKV's second stage alone, on the whole cache (arXiv 2502.14051, section 3.3).

Each step scores pages of consecutive slots from their key bounds on the query's largest channels, then attends exactly
to `top_k` tokens of the best pages; a row that fits the token budget is attended densely. A turn of a conversation
attends exactly to everything and is appended.

Deviations: dense when it fits (the released code attends to half the budget even then); pages count over the cache
from slot 0; empty slots of a partial page are +-inf (TensorRT-LLM: 0); a channel sum of exactly 0 takes the minimum;
scores are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvc_trt import reference
from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.inputs import DEFAULT_WINDOW, EVERY_POLICY, SELECTION, PolicyInputs, constants
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.methods.base.rocketkv_budget import default_channels, default_page_size
from kvc_trt.methods.full import NOTHING
from kvc_trt.methods.rankings.channels import MOST_CHANNEL_CHOICES, OnChannels, possible_channels
from kvc_trt.methods.rankings.exact_softmax import capped, sink_logits, slope_of_cap
from kvc_trt.methods.rankings.pages import bounds_of_pages, steps_of_bounds, together
from kvc_trt.methods.rankings.ranking import ChosenList, Step, StepRanking, few
from kvc_trt.methods.rankings.rounding import (
    LARGEST_EXPONENT,
    RELATIVE_ROUNDING,
    BoundedScores,
    Float64,
    Int64,
    Magnitude,
    lost_to_underflow,
    off_by,
    outside_tolerance,
)
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.reference.softmax import PLAIN, Softmax

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import LayerCache, Selection


@dataclass(frozen=True)
class ChannelChoice:
    """Channels that score the pages, and per channel whether the page's maximum (else its minimum) is read."""

    channels: Int64
    take_maximum: NDArray[np.bool_]


@dataclass(frozen=True)
class PageScores(Magnitude):
    """Exact scores of pages: `token_weight` [pages] is the score of every token of a page.

    `magnitude` is M of the tolerance 2^-20 (1+M), `underflow` is the most that a score may lose below float32's normal
    range."""

    token_weight: Float64
    magnitude: float
    products: int
    underflow: float


@dataclass(frozen=True)
class ByPages(StepRanking):
    """Cached tokens ranked by the bounds of their page on the query's largest channels."""

    page_size: int
    top_r: int
    fp8_bounds: bool = False
    recent: int = 0
    """Last tokens that are read in any case, and do not compete."""
    proves_equal_inputs = True

    @override
    def explain(self, inputs: Step, chosen: ChosenList, slack: float) -> str | None:
        """Judge the list by every choice of channels and bounds that rounding may have made."""
        if (broken := self._breaks_page_order(inputs, chosen)) is not None:
            return broken
        query, keys = inputs.queries_of(chosen), inputs.keys_of(chosen)
        taken, open_tokens = self._competing(inputs, chosen)
        softmax = inputs.softmax_of(chosen)
        problems = (
            self.scores(query, keys, choice, slack, softmax).first(open_tokens).unexplained(taken)
            for choice in possible_choices(query, self.top_r, slack)
        )
        return chosen.instead("read", _first_unless_explained(problems))

    @override
    def explain_on_equal_inputs(self, inputs: Step, chosen: ChosenList, *, truncates: bool) -> str | None:
        """Judge the list by every choice of channels and bounds that float32 may have made; exact copies tie."""
        if (broken := self._breaks_page_order(inputs, chosen)) is not None:
            return broken
        query, keys = inputs.queries_of(chosen), inputs.keys_of(chosen)
        choices = channel_choices(query, self.top_r)
        given = *self._competing(inputs, chosen), truncates, inputs.softmax_of(chosen)
        problems = (self._outside_tolerance(query, keys, choice, *given) for choice in choices)
        return chosen.instead("read", _first_unless_explained(problems, "the query is not a number"))

    def scores(
        self, query: Float64, keys: Float64, choice: ChannelChoice, slack: float, softmax: Softmax = PLAIN
    ) -> BoundedScores:
        """Score the tokens [m] of one KV head by their pages (RocketKV, stage 2): query [g, D], keys [m, D].

        A head's score of page p is exp(s(p)) over the sum of exp(s) of all tokens, where s = q.b / T and b is the
        page's bound on the channels. With e and f for how far q and a key are off, the score's logarithm moves as s(p)
        does against the mean of all s, weighted by the attention A(j) that each page j has:

        - by the query: e |slope in q of s(p) - sum of A(j) s(j)|. A part that all pages share cancels out here;
        - by the keys: U(p) + sum of A(j) U(j), with U = |q / T on the channels| sqrt(sum of f^2 over the page's keys):
          a maximum moves on each channel by no more than some key of the page does. Bounds in fp8 may move by a step of
          fp8: U is then the sum over the channels of |q / T| times how far the rounded bound moves (`steps_of_bounds`);
        - a cap of logits divides these moves by what it flattens there (at most: the keys' moves are left as they are),
          and a sink is part of the sum that does not move;
        - and the logarithm of a mean of exponentials exceeds their mean exponent by at most half the largest's square.
        """
        starts = np.arange(0, len(keys), self.page_size)
        sizes = np.minimum(self.page_size, len(keys) - starts)
        used = keys[:, choice.channels]
        least, most = bounds_of_pages(used, starts, self.fp8_bounds)
        bound = np.where(choice.take_maximum, most, least)
        tables, keys_off = np.zeros((3, len(starts))), together(off_by(keys, slack), starts)
        steps = None
        if self.fp8_bounds:
            least_off, most_off = steps_of_bounds(used, starts, keys_off)
            steps = np.where(choice.take_maximum, most_off, least_off)
        sinks = np.broadcast_to(sink_logits(softmax), len(query))
        for q, e, sink in zip(query, off_by(query, slack), sinks, strict=True):
            head = OnChannels(q, choice.channels)
            logits = head.logits(bound)
            seen, slope = capped(logits, softmax), slope_of_cap(logits, softmax)
            highest = max(seen.max(), sink)
            score = np.exp(seen - highest)
            score /= score @ sizes + np.exp(sink - highest)
            share, steep, moved = score * sizes, slope[:, None] * bound, slope * logits
            by_query = e * head.slopes(steep - share @ steep, moved - share @ moved)
            by_keys = np.linalg.norm(head.direction) * keys_off if steps is None else steps @ np.abs(head.direction)
            moves = by_query + by_keys + share @ by_keys + (by_query + by_keys).max() ** 2 / 2
            moves = np.minimum(moves, LARGEST_EXPONENT)
            tables += score * np.exp([np.zeros(len(starts)), -moves, moves]) / len(query)
        tables[1] -= lost_to_underflow(len(query))
        return BoundedScores(*(np.repeat(table, self.page_size)[: len(keys)] for table in tables))

    def _breaks_page_order(self, step: Step, chosen: ChosenList) -> str | None:
        """Return the fault in the order of a list that no scores explain; None if there is none.

        The last `recent` tokens are read. A page's other tokens share a score: the lowest are read, of one page a part.
        """
        taken, open_tokens = self._competing(step, chosen)
        if chosen.taken.size - taken.size < self.recent:
            last = np.setdiff1d(np.arange(open_tokens, step.stored(chosen)), chosen.taken)
            return f"the last {self.recent} tokens are read in any case, and {few(last)} of them are not"
        pages, first, counts = np.unique(taken // self.page_size, return_index=True, return_counts=True)
        starts = pages * self.page_size
        not_lowest = (taken[first] != starts) | (taken[first + counts - 1] != starts + counts - 1)
        if not_lowest.any():
            return f"page {pages[not_lowest][0]} did not give its lowest tokens: an exact tie, and the lower index wins"
        cut = counts < np.minimum(self.page_size, open_tokens - starts)
        return f"pages {few(pages[cut])} are cut, at most one may be" if cut.sum() > 1 else None

    def _competing(self, step: Step, chosen: ChosenList) -> tuple[Int64, int]:
        """Return the tokens of the list that competed, and how many tokens of the row did: not the last `recent`."""
        open_tokens = step.stored(chosen) - self.recent
        return chosen.taken[chosen.taken < open_tokens], open_tokens

    def _outside_tolerance(
        self, query: Float64, keys: Float64, choice: ChannelChoice, taken: Int64, open_tokens: int, truncates: bool,
        softmax: Softmax,
    ) -> str | None:  # fmt: skip
        """Return why `taken` are not the best of the first `open_tokens` up to near-ties; None if they are."""
        scores = page_scores(query, keys, self.page_size, choice, fp8_bounds=self.fp8_bounds, softmax=softmax)
        weight = np.repeat(scores.token_weight, self.page_size)[:open_tokens]
        order = np.lexsort((np.arange(weight.size), -weight))
        best = np.sort(order[: taken.size])
        extra, missing = np.setdiff1d(taken, best), np.setdiff1d(best, taken)
        if not extra.size:
            return None
        tolerance = scores.allowed(truncates=truncates)
        problem = outside_tolerance(weight[extra], weight[missing], tolerance, scores.underflow)
        if problem is not None:
            return problem
        for kept in np.unique(extra // self.page_size):
            for dropped in np.unique(missing // self.page_size):
                if dropped < kept and self._copies(keys[:, choice.channels], int(kept), int(dropped)):
                    return f"pages {dropped} and {kept} are exact copies, and the lower index wins"
        return None

    def _copies(self, keys: Float64, one: int, other: int) -> bool:
        """Tell whether two pages of keys [m, r] have the same size and the same bounds."""
        a, b = (keys[page * self.page_size : (page + 1) * self.page_size] for page in (one, other))
        one_bounds, other_bounds = (bounds_of_pages(page, np.zeros(1, np.int64), self.fp8_bounds) for page in (a, b))
        return len(a) == len(b) and np.array_equal(one_bounds, other_bounds)


def _first_unless_explained(problems: Iterator[str | None], without_choice: str | None = None) -> str | None:
    """Return the problem under the exact choice, which comes first; None if the list has none under some choice.

    `without_choice` is the problem where there is no choice at all."""
    first: str | None = None
    for problem in problems:
        if problem is None:
            return None
        first = first or problem
    return first or without_choice


def possible_choices(query: Float64, top_r: int, slack: float) -> Iterator[ChannelChoice]:
    """Yield every choice of channels and bounds that a query [g, D] may have made before rounding; the exact one first.

    A page's maximum is its bound where the sum of q over the heads is positive, else its minimum; each head moves that
    sum by no more than it is off.
    """
    for channels in possible_channels(query, top_r, slack):
        total = query[:, channels].sum(0)
        doubtful = np.flatnonzero(np.abs(total) <= off_by(query, slack).sum())
        for flips in islice(product((False, True), repeat=len(doubtful)), MOST_CHANNEL_CHOICES):
            rising = total > 0
            rising[doubtful] ^= np.array(flips, dtype=bool)
            yield ChannelChoice(channels, rising)


def channel_choices(query: Float64, top_r: int) -> Iterator[ChannelChoice]:
    """Yield every choice of channels and bounds that float32 may have made for `query` [g, D]; the exact choice first.

    A sum of q that is 0 to 2^-20 has either sign.
    """
    for channels in _channel_sets(query, top_r):
        yield from _sign_choices(query, channels)


def _channel_sets(query: Float64, top_r: int) -> Iterator[Int64]:
    """Yield every set of channels [r], ascending, that float32 may have chosen for `query` [g, D]; the exact one first.

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
    """Tell whether a chosen channel has an unchosen, exactly equal one below it."""
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


def page_scores(
    query: Float64, keys: Float64, page_size: int, choice: ChannelChoice, *, fp8_bounds: bool = False,
    softmax: Softmax = PLAIN,
) -> PageScores:  # fmt: skip
    """Score the pages of one KV head exactly (RocketKV, stage 2): query [g, D]; keys [m, D] with the current one."""
    starts = np.arange(0, len(keys), page_size)
    sizes = np.minimum(page_size, len(keys) - starts)
    used = keys[:, choice.channels]
    minimum, maximum = bounds_of_pages(used, starts, fp8_bounds)
    bound = np.where(choice.take_maximum, maximum, minimum)
    q = query[:, choice.channels]

    total, part = np.abs(query).sum(-1), np.abs(q).sum(-1)
    coverage = np.where((total > 0) & (part > 0), part / np.where(total > 0, total, 1), 1.0)
    temperature = np.sqrt(keys.shape[1] * coverage)[:, None]

    logits, sinks = capped(q @ bound.T / temperature, softmax), sink_logits(softmax)[:, None]
    highest = np.maximum(logits.max(-1, keepdims=True), sinks)
    weights = np.exp(logits - highest)
    weights /= (weights * sizes).sum(-1, keepdims=True) + np.exp(sinks - highest)
    magnitude = float((np.abs(q) @ np.abs(bound).T / temperature).max())
    return PageScores(weights.mean(0), magnitude, choice.channels.size, lost_to_underflow(len(query)))


class BestOfPages(DecodeSelection):
    """Select the best tokens by the bounds of their pages on the query's largest channels."""

    name = "hybrid"
    any_softmax = True
    operators = (HYBRID_ATTENTION,)
    reads_a_part = True

    @override
    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        if cache.page_min is None or cache.page_max is None:
            raise ValueError("page_min and page_max are missing; expected the bounds of every page [B,G,P,D]")
        read = reference.hybrid_attention(
            query, cache.keys, cache.values, cache.lengths, cache.page_min, cache.page_max,
            page_size=rule.page_size, top_r=rule.top_r, top_k=rule.top_k,
            token_budget=rule.token_budget, dense_until=rule.dense_until, force_recent=rule.recent,
            softmax=cache.softmax,
        )  # fmt: skip
        return reference.Selection(*read)

    @override
    def pairs_to_choose(self, rule: Constants, entries: int, head_size: int) -> float:
        """Count `top_r` channels of one bound of every page."""
        return -(-entries // rule.page_size) * rule.top_r / (2 * head_size)

    @override
    def describe(self, rule: Constants) -> str:
        bounds = ", bounds in fp8" if rule.fp8_bounds else ""
        recent = f", the last {rule.recent:,} always" if rule.recent else ""
        return f"page size {rule.page_size}, {rule.top_r} channels{bounds}{recent}"

    @override
    def ranking(self, rule: Constants) -> ByPages:
        """Return the ranking by pages and their channels."""
        return ByPages(rule.page_size, rule.top_r, rule.fp8_bounds, rule.recent)


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Let the decode step do all of the compression: larger pages and fewer channels than RocketKV."""
    return select_from_pages(
        inputs, NOTHING, capacity=inputs.sequence, prompt_budget=inputs.max_input_len, pool_kernel=1
    )


def select_from_pages(
    inputs: PolicyInputs, eviction: PromptEviction, *, capacity: int, prompt_budget: int, pool_kernel: int
) -> PolicyParameters:
    """Return the parameters of hybrid attention over a cache of `capacity` slots."""
    page_size = inputs.value("page_size", default_page_size(capacity, inputs.budget))
    channels = default_channels(capacity, inputs.budget, page_size, inputs.model.head_size)
    top_k, recent = inputs.value("top_k", inputs.budget // 2), inputs.value("recent", 0)
    if recent > top_k:
        raise InputError(
            f"recent is {recent}; expected at most the {top_k} tokens that a step reads",
            hint=f"--set recent={top_k}, or a larger --token-budget",
        )
    return constants(
        inputs, eviction, BEST_OF_PAGES,
        capacity=capacity,
        prompt_budget=prompt_budget,
        window=inputs.value("window", DEFAULT_WINDOW),
        pool_kernel=pool_kernel,
        page_size=page_size,
        top_r=inputs.value("top_r", channels),
        top_k=top_k,
        dense_until=inputs.value("dense_until", inputs.budget),
        recent=recent,
    )  # fmt: skip


BEST_OF_PAGES = BestOfPages()
HYBRID = Policy(
    name="hybrid",
    summary="keep every token, read the most promising ones",
    source="RocketKV stage 2, arXiv 2502.14051",
    eviction=NOTHING,
    selection=BEST_OF_PAGES,
    resolve=resolve,
    overrides=(*SELECTION, *EVERY_POLICY),
    candidate=True,
)
