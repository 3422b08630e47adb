"""Decide whether two index lists are the same choice: equal, or proven in float64 to differ only by rounding.

Ties are structural here (a max-pool makes plateaus, the tokens of a page share one score), so by rule the lowest index
wins, and lists are compared for equality. Only different orders of summation may still swap positions. A swap is
admitted if the exact scores differ by at most 2^-20 (1+M) relative, M = max over heads of sum|q·x|/T. To this is added,
if the executor has tensor cores, the share that they cut off sums (`methods.rankings.rounding.truncated_share`), and as
an absolute amount the loss of weights below float32's normal range, of which an executor may make 0
(`lost_to_underflow`). Equal scores never count as a near-tie: an executor that breaks a tie towards the higher index is
wrong.

Proofs are made by the ranking of a kind (`methods.rankings.ranking`). This file compares and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvc_trt.methods.base.isolated_runs import ExactList
from kvc_trt.methods.rankings.ranking import ChosenList, PromptRanking, Prompts, Step, StepRanking

Lists = NDArray[np.integer]


@dataclass(frozen=True)
class IndexComparison:
    """The verdict on `compared` index lists (one per row and head)."""

    compared: int = 0
    near_ties: int = 0
    swapped_tokens: int = 0
    upwards: int = 0
    """The number of near-ties with a higher index in place of a lower one: errors if the scores are built to tie."""
    wrong: tuple[str, ...] = ()

    def __add__(self, other: IndexComparison) -> IndexComparison:
        return IndexComparison(
            self.compared + other.compared,
            self.near_ties + other.near_ties,
            self.swapped_tokens + other.swapped_tokens,
            self.upwards + other.upwards,
            self.wrong + other.wrong,
        )


def compare_lists(expected: Lists, actual: Lists, explain: Callable[[ChosenList], str | None]) -> IndexComparison:
    """Compare lists `actual` [B, heads, .] with `expected`.

    `explain` returns the reason why a list that differs is wrong; None if rounding explains it.
    """
    result = IndexComparison()
    for row, head in np.ndindex(*expected.shape[:2]):
        found, problem = _difference(row, head, expected, actual)
        if problem is None and found is not None:
            problem = explain(found)
        if problem is not None:
            result += IndexComparison(1, wrong=(f"row {row}, KV head {head}: {problem}",))
        else:
            result += IndexComparison(1) if found is None else _admitted(found)
    return result


def _admitted(found: ChosenList) -> IndexComparison:
    upwards = int(found.extra.max() > found.missing.min())
    return IndexComparison(1, near_ties=1, swapped_tokens=found.extra.size, upwards=upwards)


def _difference(row: int, head: int, expected: Lists, actual: Lists) -> tuple[ChosenList | None, str | None]:
    """Return a list that differs, or a problem of its form; (None, None) if it equals the expected one."""
    wanted, given = expected[row, head], actual[row, head]
    wanted, taken = wanted[wanted >= 0], given[given >= 0]
    if np.any(given[: taken.size] < 0) or np.any(np.diff(taken) <= 0):
        return None, "the list is not ascending with -1 past its end"
    if wanted.size != taken.size:
        return None, f"{taken.size} tokens, expected {wanted.size}"
    if np.array_equal(wanted, taken):
        return None, None
    extra, missing = np.setdiff1d(taken, wanted), np.setdiff1d(wanted, taken)
    return ChosenList(row, head, actual.shape[1], taken.astype(np.int64), extra, missing), None


def count_differences(expected: Lists, actual: Lists) -> IndexComparison:
    """Count the lists that differ as `near_ties`, without judging any of them."""
    return compare_lists(expected, actual, lambda chosen: None)


def compare_kept(
    ranking: PromptRanking | None, prompts: Prompts, expected: Lists, actual: Lists, *, truncates: bool = False
) -> IndexComparison:
    """Compare kept positions `actual` [B, G, >=C] with the reference's `expected` on the same inputs.

    Without a ranking, nothing is evicted. `truncates` says that tensor cores have summed the products.
    """

    def explain(chosen: ChosenList) -> str | None:
        assert ranking is not None, "lists that keep everything do not differ"
        return ranking.explain_on_equal_inputs(prompts, chosen, truncates=truncates)

    return compare_lists(expected, actual, lambda chosen: _not_of_prompt(prompts, chosen) or explain(chosen))


def judge_kept(
    ranking: PromptRanking | None, prompts: Prompts, own: Lists, given: Lists, slack: float
) -> IndexComparison:
    """Judge kept positions `given` of another executor, whose inputs differ from the reference's `prompts` by rounding.

    `own` are the reference's positions.
    """

    def explain(chosen: ChosenList) -> str | None:
        assert ranking is not None, "lists that keep everything do not differ"
        return ranking.explain(prompts, chosen, slack)

    return compare_lists(own, given, lambda chosen: _not_of_prompt(prompts, chosen) or explain(chosen))


def compare_read(
    ranking: StepRanking, step: Step, expected: Lists, actual: Lists, *, truncates: bool = False
) -> IndexComparison:
    """Compare tokens read by one step, `actual` [B, G, .], with the reference's `expected` on the same inputs.

    `truncates` says that tensor cores have summed the products.
    """

    def explain(chosen: ChosenList) -> str | None:
        return ranking.explain_on_equal_inputs(step, chosen, truncates=truncates)

    return compare_lists(expected, actual, lambda chosen: _not_stored(step, chosen) or explain(chosen))


def judge_read(
    ranking: StepRanking, step: Step, own: Lists, given: Lists, slack: float
) -> tuple[IndexComparison, list[ChosenList]]:
    """Judge tokens read by a step, `given` [B, G, .] or [B, H, .], of an executor whose inputs differ by rounding.

    `own` are the reference's lists. The lists that differ and that rounding explains are returned, too.
    """
    explained = []

    def explain(chosen: ChosenList) -> str | None:
        problem = _not_stored(step, chosen) or ranking.explain(step, chosen, slack)
        if problem is None:
            explained.append(chosen)
        return problem

    return compare_lists(own, given, explain), explained


def _not_of_prompt(prompts: Prompts, chosen: ChosenList) -> str | None:
    count, last = int(prompts.lengths[chosen.row]), chosen.extra.max()
    return f"kept position {last} of a prompt of {count} tokens" if last >= count else None


def _not_stored(step: Step, chosen: ChosenList) -> str | None:
    stored, last = step.stored(chosen), chosen.extra.max()
    return f"read slot {last} of {stored} stored tokens" if last >= stored else None


def compare_exactly(choice: ExactList) -> IndexComparison:
    """Compare lists of one row that must equal one of several expected choices, or differ by underflow alone."""

    def explain(chosen: ChosenList) -> str | None:
        return "it is another" if choice.ranked is None else choice.ranked.explain(choice.found, chosen)

    every = [compare_lists(one[None], choice.found[None], explain) for one in choice.expected]
    compared = min(every, key=lambda found: (len(found.wrong), found.near_ties))
    if not compared.wrong:
        return compared
    wrong = f"row {choice.row}: {len(compared.wrong)} lists of kept tokens differ ({compared.wrong[0]})"
    return IndexComparison(compared.compared, wrong=(wrong,))
