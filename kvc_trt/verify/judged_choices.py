"""Choices of another executor against the reference's own, by the rule that goes with a policy's ranking.

Here the inputs are the reference's, and the executor's differ from them by rounding. So copies of one score need not
tie there: what a list says is wrong only if no rounding within `slack` explains it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_trt.methods.verification import ByChannels, ByDirection, ByExpectedQueries, ByPageBounds, ByPages, ByWindow
from kvc_trt.reference.sparq import channels_of
from kvc_trt.verify.bounded_scores import (
    scores_by_direction,
    scores_by_expected_queries,
    scores_of_pages,
    scores_on_channels,
)
from kvc_trt.verify.near_ties import (
    Difference,
    IndexComparison,
    compare_compaction,
    compare_lists,
    compare_selection,
    few,
)
from kvc_trt.verify.scores import Float64, Int64, channel_sets

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
    ranking = rule.selection.ranking(rule)
    assert ranking is not None, "its choices can be judged"
    if isinstance(ranking, ByPages):
        inputs = (query.numpy(), keys.numpy(), lengths.numpy(), own.numpy(), given)
        return compare_selection(*inputs, page_size=ranking.page_size, top_r=ranking.top_r, slack=slack), None
    stored = lengths.tolist()
    if isinstance(ranking, ByChannels):
        return _judge_by_channels(query, keys, stored, own, given, ranking.top_r, slack)
    assert isinstance(ranking, ByPageBounds)

    def explain(row: int, head: int, difference: Difference) -> str | None:
        m, of_head = stored[row], keys[row, head * keys.shape[1] // query.shape[1]]
        if difference.extra.max() >= m:
            return f"read slot {difference.extra.max()} of {m} stored tokens"
        pages, counts = np.unique(_taken(given[row, head]) // ranking.page_size, return_counts=True)
        cut = pages[counts < np.minimum(ranking.page_size, m - pages * ranking.page_size)]
        newest = (m - 1) // ranking.page_size
        if cut.size or newest not in pages:
            return f"page {cut[0]} is not read whole" if cut.size else f"the newest page, {newest}, must be read"
        scores = scores_of_pages(_exact(query[row, head]), _exact(of_head[:m]), ranking.page_size, slack)
        return _said("read", difference, scores.without_last().unexplained(pages[:-1]))

    return compare_lists(own.numpy(), given, explain), None


def _judge_by_channels(
    query: Tensor, keys: Tensor, lengths: list[int], own: Tensor, given: Lists, top_r: int, slack: float
) -> tuple[IndexComparison, Tensor]:
    groups = keys.shape[1]
    used = channels_of(query, groups, top_r)

    def explain(row: int, head: int, difference: Difference) -> str | None:
        m, taken = lengths[row], _taken(given[row, head])
        if difference.extra.max() >= m:
            return f"read slot {difference.extra.max()} of {m} stored tokens"
        if taken[-1] != m - 1:
            return f"the current token, {m - 1}, must be read"
        of_group, stored = _exact(_of_head(query[row], head, groups)), _exact(keys[row, head, :m])
        first_problem: str | None = None
        for channels in channel_sets(of_group, top_r, slack):
            problem = scores_on_channels(of_group, stored, channels, slack).without_last().unexplained(taken[:-1])
            if problem is None:
                used[row, head] = torch.from_numpy(channels)
                return None
            first_problem = first_problem or problem
        return _said("read", difference, first_problem)

    compared = compare_lists(own.numpy(), given, explain)
    return compared, used


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
