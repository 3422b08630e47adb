"""A policy beside the full cache, question by question.

A real model does not answer every question with the full cache either. What it misses says nothing about a policy, so
a policy is also judged on the questions that the full cache answers, and by the difference of the two on all of them.
Scores are given in the order of the same questions. A measurement that was cut short has more of the full cache's than
of the others': what only one of the two has is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvc_trt.accuracy.cell import Mean, mean, paired_difference

CHANCE = 0.05
"""A difference that equal methods show more often than this is none."""
ANSWERED = 1.0
"""The score of a question that is answered: every value that was asked for."""


def on_answered(scores: Sequence[float], full: Sequence[float]) -> Mean | None:
    """A policy's accuracy on the questions that the full cache answers; None where there is none of them."""
    kept = [mine for mine, theirs in zip(scores, full, strict=False) if theirs >= ANSWERED]
    return mean(kept) if kept else None


def difference(first: Sequence[float], second: Sequence[float]) -> Mean | None:
    """First minus second, of accuracies or likelihoods; None where no question was asked of both."""
    common = min(len(first), len(second))
    return paired_difference(first[:common], second[:common]) if common else None


def higher_and_lower(first: Sequence[float], second: Sequence[float]) -> tuple[int, int]:
    """On how many questions the first scores higher than the second, and on how many lower."""
    pairs = list(zip(first, second, strict=False))
    return sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)


def sign_test(first: Sequence[float], second: Sequence[float]) -> float:
    """How often two equally good methods differ on as many questions in one direction, or more: exact, two-sided.

    It asks only on how many questions each is better, so that it holds for few questions too, where a standard error
    of answers that are all alike is 0. Its direction is that of `higher_and_lower`, which the mean may contradict.
    """
    higher, lower = higher_and_lower(first, second)
    count, tail = higher + lower, min(higher, lower)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(tail + 1)) / (1 << count))
