"""The smallest budgets for equal answers, from curves over budgets, with intervals that a bootstrap over prompts gives.

A curve is the mean over prompts by budget; between two budgets it is taken for a line. The first crossing counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Curves = NDArray[np.float64]
"""A row for each prompt, a column for each budget."""
RESAMPLES = 1000


@dataclass(frozen=True)
class Needed:
    """A budget, or a ratio of two, and the interval of 95 %; None where a curve does not come so low."""

    value: float | None
    low: float | None
    high: float | None

    def percent(self) -> str:
        """In percent, with the interval."""
        if self.value is None:
            return "none"
        ends = [f"{100 * one:.0f}" if one is not None else "none" for one in (self.low, self.high)]
        return f"{100 * self.value:.0f} % ({ends[0]} to {ends[1]})"


def crossing(budgets: Sequence[float], curve: Sequence[float], limit: float) -> float | None:
    """Return the first budget at which a curve is at most `limit`; None if it is above it everywhere."""
    for place, (budget, value) in enumerate(zip(budgets, curve, strict=True)):
        if value <= limit:
            if place == 0:
                return budget
            before, above = budgets[place - 1], curve[place - 1]
            return before + (budget - before) * (above - limit) / (above - value)
    return None


def needed(statistic: Callable[[NDArray[np.int64]], float | None], prompts: int) -> Needed:
    """Return a statistic of all prompts, which takes their indices, and its interval over resampled ones.

    A resample without a value counts as infinitely large.
    """
    random = np.random.default_rng(0)
    drawn = [statistic(random.integers(0, prompts, prompts)) for _ in range(RESAMPLES)]
    values = sorted(np.inf if one is None else one for one in drawn)
    ends = [float(values[int(part * (RESAMPLES - 1))]) for part in (0.025, 0.975)]
    low, high = (None if np.isinf(one) else one for one in ends)
    return Needed(statistic(np.arange(prompts)), low, high)


def budget_at(budgets: Sequence[float], curves: Curves, limit: float) -> Needed:
    """Return the smallest budget whose mean is at most `limit`."""
    return needed(lambda some: crossing(budgets, curves[some].mean(axis=0).tolist(), limit), len(curves))


def budget_as_good(budgets: Sequence[float], without: Curves, divided: Curves, budget: float) -> Needed:
    """Return the smallest budget at which the mean of `divided` is at most that of `without` at `budget`."""
    place = list(budgets).index(budget)

    def statistic(some: NDArray[np.int64]) -> float | None:
        limit = float(without[some, place].mean())
        return crossing(budgets, divided[some].mean(axis=0).tolist(), limit)

    return needed(statistic, len(without))
