"""Are two index lists the same choice? Equal, or proven in float64 to differ only where rounding can swap scores.

Ties are structural here (a max-pool makes plateaus, the tokens of a page share one score), so the lowest index wins by
rule and lists are compared for equality. Only different summation orders may still swap positions, and a swap is
admitted if the exact scores differ by at most 2^-20 (1+M) relative, M = max over heads of sum|q·x|/T, and, where the
executor has tensor cores, by what they cut off sums (`scores.truncated_share`). To this comes, absolutely, what weights
below float32's normal range lose where an executor makes 0 of them (`scores.lost_to_underflow`). Copies of one score
never count as a near-tie: an executor that breaks a tie towards the higher index is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvc_trt.verify.rankings.scores import (
    ExactPromptScores,
    Float64,
    Int64,
    PageScores,
    bounds_of_pages,
    channel_choices,
    page_scores,
    prompt_scores,
)


@dataclass(frozen=True)
class IndexComparison:
    """What became of `compared` index lists (one per row and KV head)."""

    compared: int = 0
    near_ties: int = 0
    swapped_tokens: int = 0
    upwards: int = 0
    """Near-ties with a higher index in place of a lower one: broken ties where the scores were built to tie."""
    wrong: tuple[str, ...] = ()

    def __add__(self, other: IndexComparison) -> IndexComparison:
        return IndexComparison(
            self.compared + other.compared,
            self.near_ties + other.near_ties,
            self.swapped_tokens + other.swapped_tokens,
            self.upwards + other.upwards,
            self.wrong + other.wrong,
        )


@dataclass(frozen=True)
class Difference:
    """Tokens of a list that the expected one has not, and the reverse; as many of both."""

    extra: Int64
    missing: Int64


@dataclass(frozen=True)
class _Rule:
    page_size: int
    top_r: int
    fp8_bounds: bool
    truncates: bool


def compare_compaction(
    q_window: NDArray[np.floating],
    keys: NDArray[np.floating],
    prompt_lengths: NDArray[np.integer],
    expected: NDArray[np.integer],
    actual: NDArray[np.integer],
    *,
    pool_kernel: int,
    slack: float = 1.0,
    truncates: bool = False,
) -> IndexComparison:
    """Kept prompt positions `actual` [B, G, >=C] against the reference's `expected` [B, G, C], -1 past a row's end.

    q_window [B, H, W, D], keys [B, G, S, D] and prompt_lengths [B] are the operator's own inputs; where they are
    another executor's, which carry rounding of their own, `slack` widens the tolerance. `truncates`: tensor cores have
    summed the products.
    """
    groups = keys.shape[1]
    queries = _grouped(q_window, groups)

    def explain(row: int, head: int, difference: Difference) -> str | None:
        length = int(prompt_lengths[row])
        if difference.extra.max() >= length:
            return f"kept position {difference.extra.max()} of a prompt of {length} tokens"
        stored = keys[row, head, :length].astype(np.float64)
        scores = prompt_scores(queries[row, head], stored, pool_kernel)
        return _judge_compaction(scores, pool_kernel, difference, _tolerance(scores, truncates, slack))

    return compare_lists(expected, actual, explain)


def compare_selection(
    query: NDArray[np.floating],
    keys: NDArray[np.floating],
    lengths: NDArray[np.integer],
    expected: NDArray[np.integer],
    actual: NDArray[np.integer],
    *,
    page_size: int,
    top_r: int,
    fp8_bounds: bool = False,
    truncates: bool = False,
) -> IndexComparison:
    """Tokens read by one step on equal inputs, `actual` [B, G, .] against the reference's `expected`.

    query [B, H, D]; keys [B, G, C, D] with the current token stored; lengths [B] after the append; `truncates` as for
    compaction.
    """
    queries = _grouped(query[:, :, None], keys.shape[1])[:, :, :, 0]

    def explain(row: int, head: int, difference: Difference) -> str | None:
        length = int(lengths[row])
        if difference.extra.max() >= length:
            return f"read slot {difference.extra.max()} of {length} stored tokens"
        chosen = actual[row, head][actual[row, head] >= 0].astype(np.int64)
        if (broken := breaks_page_order(chosen, page_size, length)) is not None:
            return broken
        stored = keys[row, head, :length].astype(np.float64)
        rule = _Rule(page_size, top_r, fp8_bounds, truncates)
        return _judge_selection(queries[row, head], stored, rule, difference, chosen)

    return compare_lists(expected, actual, explain)


def count_differences(expected: NDArray[np.integer], actual: NDArray[np.integer]) -> IndexComparison:
    """Lists that differ, none of them judged: `near_ties` is their number."""
    return compare_lists(expected, actual, lambda row, head, difference: None)


def _grouped(queries: NDArray[np.floating], groups: int) -> Float64:
    """[B, H, W, D] -> [B, G, g, W, D]."""
    batch, heads, window, size = queries.shape
    return queries.astype(np.float64).reshape(batch, groups, heads // groups, window, size)


def compare_lists(
    expected: NDArray[np.integer],
    actual: NDArray[np.integer],
    explain: Callable[[int, int, Difference], str | None],
) -> IndexComparison:
    """Compare lists `actual` [B, heads, .] with `expected`; `explain` says of one that differs what is wrong, if so."""
    result = IndexComparison()
    for row, head in np.ndindex(*expected.shape[:2]):
        found, problem = _difference(expected[row, head], actual[row, head])
        if problem is None and found is not None:
            problem = explain(row, head, found)
        if problem is not None:
            result += IndexComparison(1, wrong=(f"row {row}, KV head {head}: {problem}",))
        else:
            result += IndexComparison(1) if found is None else _admitted(found)
    return result


def _admitted(found: Difference) -> IndexComparison:
    upwards = int(found.extra.max() > found.missing.min())
    return IndexComparison(1, near_ties=1, swapped_tokens=found.extra.size, upwards=upwards)


def _difference(expected: NDArray[np.integer], actual: NDArray[np.integer]) -> tuple[Difference | None, str | None]:
    wanted, got = expected[expected >= 0], actual[actual >= 0]
    if np.any(actual[: got.size] < 0) or np.any(np.diff(got) <= 0):
        return None, "the list is not ascending with -1 past its end"
    if wanted.size != got.size:
        return None, f"{got.size} tokens, expected {wanted.size}"
    if np.array_equal(wanted, got):
        return None, None
    return Difference(np.setdiff1d(got, wanted), np.setdiff1d(wanted, got)), None


def _tolerance(scores: ExactPromptScores | PageScores, truncates: bool, slack: float = 1.0) -> float:
    return slack * scores.tolerance + (scores.truncation if truncates else 0.0)


def _judge_compaction(
    scores: ExactPromptScores, pool_kernel: int, difference: Difference, tolerance: float
) -> str | None:
    if max(difference.extra.max(), difference.missing.max()) >= scores.pooled.size:
        return f"the window must be kept, {difference.missing.max()} is not"
    pooled, lost = scores.pooled, 2 * scores.underflow  # by the executor that kept these tokens, and by the reference
    problem = _outside_tolerance(pooled[difference.extra], pooled[difference.missing], tolerance, lost)
    if problem is not None:
        return f"kept {few(difference.extra)} instead of {few(difference.missing)}: {problem}"

    contenders = {
        int(j): _contenders(scores, int(j), pool_kernel, tolerance) for j in (*difference.extra, *difference.missing)
    }
    for kept in difference.extra:
        for dropped in difference.missing:
            # Whatever rounding does, the dropped one scores at least as high and comes first.
            if dropped < kept and contenders[int(kept)] <= contenders[int(dropped)]:
                return f"kept {kept} instead of {dropped}: an exact tie, and the lower index wins"
    return None


def _contenders(scores: ExactPromptScores, position: int, kernel: int, tolerance: float) -> set[int]:
    """Positions under the pooling window of `position` that float32 may have found to be its maximum.

    Where underflow may have lost the maximum, that is any of them.
    """
    first, last = max(0, position - kernel // 2), position + kernel // 2 + 1
    near = scores.summed[first:last] >= scores.pooled[position] * (1 - tolerance) - scores.underflow
    return {first + int(j) for j in np.flatnonzero(near)}


def _judge_selection(query: Float64, keys: Float64, rule: _Rule, difference: Difference, chosen: Int64) -> str | None:
    """None if one admissible channel choice explains the list; else what is wrong under the exact choice."""
    first_problem: str | None = None
    for choice in channel_choices(query, rule.top_r):
        scores = page_scores(query, keys, rule.page_size, choice, fp8_bounds=rule.fp8_bounds)
        problem = _judge_pages(scores, keys[:, choice.channels], rule, chosen)
        if problem is None:
            return None
        first_problem = first_problem or problem
    return f"read {few(difference.extra)} instead of {few(difference.missing)}: {first_problem}"


def _judge_pages(scores: PageScores, used_keys: Float64, rule: _Rule, chosen: Int64) -> str | None:
    """`chosen` against the best tokens under these scores; used_keys [m, r] are the keys on the scoring channels."""
    page_size = rule.page_size
    weight = np.repeat(scores.token_weight, page_size)[: len(used_keys)]
    order = np.lexsort((np.arange(weight.size), -weight))
    best = np.sort(order[: chosen.size])
    extra, missing = np.setdiff1d(chosen, best), np.setdiff1d(best, chosen)
    if not extra.size:
        return None
    tolerance = _tolerance(scores, rule.truncates)
    problem = _outside_tolerance(weight[extra], weight[missing], tolerance, scores.underflow)
    if problem is not None:
        return problem
    for kept in np.unique(extra // page_size):
        for dropped in np.unique(missing // page_size):
            if dropped < kept and _same_page(used_keys, rule, int(kept), int(dropped)):
                return f"pages {dropped} and {kept} are exact copies, and the lower index wins"
    return None


def _same_page(keys: Float64, rule: _Rule, one: int, other: int) -> bool:
    a, b = (keys[page * rule.page_size : (page + 1) * rule.page_size] for page in (one, other))
    one_bounds, other_bounds = (bounds_of_pages(page, np.zeros(1, np.int64), rule.fp8_bounds) for page in (a, b))
    return len(a) == len(b) and np.array_equal(one_bounds, other_bounds)


def breaks_page_order(chosen: Int64, page_size: int, length: int) -> str | None:
    """What no scores explain: tokens of a page share one, so a page gives its lowest tokens, and at most one is cut."""
    pages, first, counts = np.unique(chosen // page_size, return_index=True, return_counts=True)
    starts = pages * page_size
    not_lowest = (chosen[first] != starts) | (chosen[first + counts - 1] != starts + counts - 1)
    if not_lowest.any():
        return f"page {pages[not_lowest][0]} did not give its lowest tokens: an exact tie, and the lower index wins"
    cut = counts < np.minimum(page_size, length - starts)
    return f"pages {few(pages[cut])} are cut, at most one may be" if cut.sum() > 1 else None


def _outside_tolerance(extra: Float64, missing: Float64, tolerance: float, lost: float) -> str | None:
    """Say so if scores differ by more than `tolerance` of the highest and `lost` to underflow."""
    highest = max(extra.max(), missing.max())
    gap = highest - min(extra.min(), missing.min())
    if gap <= tolerance * highest + lost:
        return None
    return f"float64 scores differ by {gap / highest:.1e} relative, a near-tie allows {tolerance + lost / highest:.1e}"


def few(values: NDArray[np.integer]) -> str:
    """The first few of some tokens, for a message."""
    shown = ", ".join(str(v) for v in values[:4])
    return f"[{shown}{', ...' if values.size > 4 else ''}]"
