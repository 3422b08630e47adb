"""Means of scores, how far they can be trusted, and differences between two policies on the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_CONFIDENCE = 1.959964
"""Standard errors of a 95 % interval."""


@dataclass(frozen=True)
class Mean:
    """The mean of `samples` scores between 0 and 1, or of their differences between -1 and 1."""

    value: float
    standard_error: float
    samples: int

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} ± {100 * self.standard_error:.1f}"


def mean(scores: Sequence[float]) -> Mean:
    """Mean and standard error; for scores of 0 and 1 the binomial sqrt(p (1 - p) / n). ValueError for no scores."""
    count = len(scores)
    if count == 0:
        raise ValueError("scores: expected at least one, found none")
    value = math.fsum(scores) / count
    variance = math.fsum((score - value) ** 2 for score in scores) / count
    return Mean(value, math.sqrt(variance / count), count)


def interval(value: float, samples: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a mean of scores between 0 and 1.

    Exact enough at 0 and 1, where the standard error says nothing; for scores in between it is too wide, not too
    narrow, because no distribution on [0, 1] varies more than 0 and 1 themselves.
    """
    z2 = _CONFIDENCE**2 / samples
    centre = (value + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (value * (1 - value) + z2 / 4)) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Mean:
    """First minus second over the same questions: what both find hard does not widen the error."""
    if len(first) != len(second):
        raise ValueError(f"scores: expected the same questions, found {len(first)} and {len(second)}")
    return mean([a - b for a, b in zip(first, second, strict=True)])
