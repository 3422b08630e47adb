"""One method beside another, question by question, and which of many such differences chance explains.

Scores are given in the order of the same questions. A measurement that was cut short has more of one method's than of
the other's: what only one of the two has is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvc_trt.accuracy.cell import Mean, paired_difference

CHANCE = 0.05
"""The share of families of comparisons between equal methods in which at least one difference is called real."""


def difference(first: Sequence[float], second: Sequence[float]) -> Mean | None:
    """First minus second, of accuracies or likelihoods; None where no question was asked of both."""
    common = min(len(first), len(second))
    return paired_difference(first[:common], second[:common]) if common else None


def higher_and_lower(first: Sequence[float], second: Sequence[float]) -> tuple[int, int]:
    """On how many questions the first scores higher than the second, and on how many lower."""
    pairs = list(zip(first, second, strict=False))
    return sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)


def sign_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p value of the exact, two-sided sign test: the chance that equal methods differ at least this much.

    It counts only the questions on which each method is better. So it holds for few questions too, where the standard
    error of equal answers is 0. Its direction is that of `higher_and_lower`, which the mean may contradict.
    """
    higher, lower = higher_and_lower(first, second)
    count, tail = higher + lower, min(higher, lower)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(tail + 1)) / (1 << count))


def holm(chances: Sequence[float]) -> list[float]:
    """Return the p values after Holm's correction for several comparisons, in their order.

    If those at or below a level are called real, the chance of at least one mistake among all of them is at most that
    level, however they depend on each other. The k-th smallest of n is multiplied by n - k + 1, and never falls below
    a smaller one.
    """
    adjusted, largest = [1.0] * len(chances), 0.0
    for rank, place in enumerate(sorted(range(len(chances)), key=lambda one: chances[one])):
        largest = max(largest, (len(chances) - rank) * chances[place])
        adjusted[place] = min(1.0, largest)
    return adjusted
