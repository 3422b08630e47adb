"""One method beside another, question by question, and which of many such differences chance explains.

Scores are given in the order of the same questions. A measurement that was cut short has more of one method's than of
the other's: what only one of the two has is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvc_trt.accuracy.cell import Mean, paired_difference

CHANCE = 0.05
"""How often, of families of comparisons in which all methods are equal, one or more differences are called real."""


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


def holm(chances: Sequence[float]) -> list[float]:
    """Holm's correction: each p value as it counts when all of them are looked at, in their order.

    Those at or below a level are told with that chance of one or more mistakes among all, however they depend on each
    other. The k-th smallest of n is multiplied by n - k + 1, and none counts for less than a smaller one.
    """
    adjusted, largest = [1.0] * len(chances), 0.0
    for rank, place in enumerate(sorted(range(len(chances)), key=lambda one: chances[one])):
        largest = max(largest, (len(chances) - rank) * chances[place])
        adjusted[place] = min(1.0, largest)
    return adjusted
