"""Choices of another executor against the reference's own, by the rule that goes with a policy's ranking.

Here the inputs are the reference's, and the executor's differ from them by rounding. So copies of one score need not
tie there: what a list says is wrong only if no rounding within `slack` explains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_trt.methods.base.isolated_runs import (
    ByChannels,
    ByDirection,
    ByExpectedQueries,
    ByPageBounds,
    ByPages,
    ByWindow,
)
from kvc_trt.reference.sparq import channels_of
from kvc_trt.verify.rankings.bounded_scores import (
    possible_channels,
    possible_choices,
    scores_by_direction,
    scores_by_expected_queries,
    scores_of_page_tokens,
    scores_of_pages,
    scores_on_channels,
)
from kvc_trt.verify.rankings.near_ties import (
    Difference,
    IndexComparison,
    breaks_page_order,
    compare_compaction,
    compare_lists,
    few,
)
from kvc_trt.verify.rankings.scores import Float64, Int64

if TYPE_CHECKING:
    from kvc_trt.policies import PolicyParameters

Lists = NDArray[np.integer]


def judge_kept(
    observed: Any, keys: Tensor, values: Tensor, prompt_lengths: Tensor, own: Tensor, given: Lists,
    rule: PolicyParameters, slack: float,
) -> IndexComparison:  # fmt: skip
    """Kept prompt positions `given` [B,G,C] against the reference's `own`, on what its compaction got."""
    ranking = rule.eviction.ranking(rule)
    if isinstance(ranking, (ByWindow, type(None))):
        pool_kernel = 1 if ranking is None else ranking.pool_kernel  # nothing is evicted: any difference is wrong
        inputs = (observed.numpy(), keys.numpy(), prompt_lengths.numpy(), own.numpy(), given)
        return compare_compaction(*inputs, pool_kernel=pool_kernel, slack=slack)
    lengths = prompt_lengths.tolist()

    def explain(row: int, head: int, difference: Difference) -> str | None:
        n, taken = lengths[row], _taken(given[row, head])
        if difference.extra.max() >= n:
            return f"kept position {difference.extra.max()} of a prompt of {n} tokens"
        if isinstance(ranking, ByDirection):
            return _said("kept", difference, scores_by_direction(_exact(keys[row, head, :n]), slack).unexplained(taken))
        assert isinstance(ranking, ByExpectedQueries)
        sinks = ranking.sinks
        if difference.missing.min() < sinks:
            return f"the first {sinks} tokens must be kept, {difference.missing.min()} is not"
        mean, covariance = (_exact(_of_head(table[row], head, keys.shape[1])) for table in observed)
        stored, weighed = (_exact(table[row, head, sinks:n]) for table in (keys, values))
        scores = scores_by_expected_queries(mean, covariance, stored, weighed, slack)
        return _said("kept", difference, scores.unexplained(taken[taken >= sinks] - sinks))

    return compare_lists(own.numpy(), given, explain)


def judge_read(
    query: Tensor, keys: Tensor, lengths: Tensor, own: Tensor, given: Lists, rule: PolicyParameters, slack: float
) -> tuple[IndexComparison, Tensor | None]:
    """Tokens that a step read, `given` [B,G,k] or [B,H,k], against the reference's `own`.

    query [B,H,D]; keys [B,G,C,D] with the current token stored; lengths [B]. Of a ranking by channels alone, the
    channels [B,G,r] that explain the lists are returned too: these may be tied as well.
    """
    step = _Step(query, keys, lengths.tolist(), slack)
    ranking = rule.selection.ranking(rule)
    assert ranking is not None, "its choices can be judged"
    if isinstance(ranking, ByPages):
        return _judge_by_pages(step, own, given, ranking), None
    if isinstance(ranking, ByChannels):
        used = channels_of(query, keys.shape[1], ranking.top_r)
        return _judge_by_channels(step, own, given, ranking.top_r, used), used
    assert isinstance(ranking, ByPageBounds)
    return _judge_by_page_bounds(step, own, given, ranking), None


@dataclass(frozen=True)
class _Step:
    """What a step chooses by: query [B,H,D], keys [B,G,C,D], lengths [B]."""

    query: Tensor
    keys: Tensor
    lengths: list[int]
    slack: float

    def of(self, row: int, head: int, lists: int) -> tuple[Float64, Float64]:
        """Return queries [g,D] and stored keys [m,D] of one of the row's `lists`."""
        kv_head = head * self.keys.shape[1] // lists
        return _exact(_of_head(self.query[row], head, lists)), _exact(self.keys[row, kv_head, : self.lengths[row]])


def _judge_by_pages(step: _Step, own: Tensor, given: Lists, ranking: ByPages) -> IndexComparison:
    def explain(row: int, head: int, difference: Difference) -> str | None:
        m, taken = step.lengths[row], _taken(given[row, head])
        if difference.extra.max() >= m:
            return _not_stored(difference, m)
        if (broken := breaks_page_order(taken, ranking.page_size, m)) is not None:
            return broken
        query, keys = step.of(row, head, given.shape[1])
        first_problem: str | None = None
        for choice in possible_choices(query, ranking.top_r, step.slack):
            scores = scores_of_page_tokens(query, keys, ranking, choice, step.slack)
            problem = scores.unexplained(taken)
            if problem is None:
                return None
            first_problem = first_problem or problem
        return _said("read", difference, first_problem)

    return compare_lists(own.numpy(), given, explain)


def _judge_by_channels(step: _Step, own: Tensor, given: Lists, top_r: int, used: Tensor) -> IndexComparison:
    """The channels of `used` [B,G,r] are replaced, in place, where others explain a list."""

    def explain(row: int, head: int, difference: Difference) -> str | None:
        m, taken = step.lengths[row], _taken(given[row, head])
        if difference.extra.max() >= m:
            return _not_stored(difference, m)
        if taken[-1] != m - 1:
            return f"the current token, {m - 1}, must be read"
        query, keys = step.of(row, head, given.shape[1])
        first_problem: str | None = None
        for channels in possible_channels(query, top_r, step.slack):
            problem = scores_on_channels(query, keys, channels, step.slack).without_last().unexplained(taken[:-1])
            if problem is None:
                used[row, head] = torch.from_numpy(channels)
                return None
            first_problem = first_problem or problem
        return _said("read", difference, first_problem)

    return compare_lists(own.numpy(), given, explain)


def _judge_by_page_bounds(step: _Step, own: Tensor, given: Lists, ranking: ByPageBounds) -> IndexComparison:
    def explain(row: int, head: int, difference: Difference) -> str | None:
        m, page_size = step.lengths[row], ranking.page_size
        if difference.extra.max() >= m:
            return _not_stored(difference, m)
        pages, counts = np.unique(_taken(given[row, head]) // page_size, return_counts=True)
        cut = pages[counts < np.minimum(page_size, m - pages * page_size)]
        newest = (m - 1) // page_size
        if cut.size or newest not in pages:
            return f"page {cut[0]} is not read whole" if cut.size else f"the newest page, {newest}, must be read"
        query, keys = step.of(row, head, given.shape[1])
        scores = scores_of_pages(query[0], keys, ranking, step.slack)
        return _said("read", difference, scores.without_last().unexplained(pages[:-1]))

    return compare_lists(own.numpy(), given, explain)


def _not_stored(difference: Difference, stored: int) -> str:
    return f"read slot {difference.extra.max()} of {stored} stored tokens"


def _taken(listed: Lists) -> Int64:
    return listed[listed >= 0].astype(np.int64)


def _exact(table: Tensor) -> Float64:
    return table.double().numpy()


def _of_head(table: Tensor, head: int, groups: int) -> Tensor:
    """The part [g,...] of `table` [H,...] that belongs to one KV head."""
    return table.reshape(groups, -1, *table.shape[1:])[head]


def _said(did: str, difference: Difference, problem: str | None) -> str | None:
    if problem is None:
        return None
    return f"{did} {few(difference.extra)} instead of {few(difference.missing)}: {problem}"
