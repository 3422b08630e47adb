"""Who answers more than whom at an equal token budget: the order that RocketKV's paper claims, pair by pair.

Both policies of a pair answered the same questions, so their difference is taken question by question, and its standard
error is that of the differences. Only groups of questions that the full cache answers take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.grid import Group
from kvc_trt.accuracy.statistics import Mean, paired_difference

Verdict = Literal["holds", "equal within the error", "does not hold"]
"""The claim is first >= second: equality within the error does not contradict it."""

NOTICEABLE = 2.0
"""Standard errors from which a difference is one."""
CLAIMS = (
    ("exact-topk", "rocketkv"),
    ("exact-topk-group", "rocketkv"),
    ("rocketkv", "hybrid"),
    ("rocketkv", "quest-matched"),
    ("rocketkv", "quest"),
    ("rocketkv", "sparq"),
    ("rocketkv", "snapkv"),
    ("rocketkv", "snapkv-gqa"),
)
"""First >= second at low budgets, arXiv 2502.14051, Tables 2 and 4 to 19; snapkv-gqa is not among its baselines."""


@dataclass(frozen=True)
class Comparison:
    """First minus second over every group that both answered."""

    first: str
    second: str
    mode: str
    token_budget: int
    difference: Mean
    groups: tuple[Group, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether first >= second, as far as the error allows to say."""
        noise = NOTICEABLE * self.difference.standard_error
        if abs(self.difference.value) <= noise:
            return "equal within the error"
        return "holds" if self.difference.value > 0 else "does not hold"


def compare(cells: Sequence[Cell], first: str, second: str, mode: str, token_budget: int) -> Comparison | None:
    """The two policies at one budget; None where no group counts in which both answered."""
    mine, other = (
        {
            cell.group: cell
            for cell in cells
            if (cell.policy, cell.token_budget, cell.mode) == (policy, token_budget, mode)
            and cell.scores
            and cell.evidence
        }
        for policy in (first, second)
    )
    common = tuple(group for group in mine if group in other)
    if not common:
        return None
    scores = [[score for group in common for score in side[group].scores] for side in (mine, other)]
    return Comparison(first, second, mode, token_budget, paired_difference(*scores), common)


def paper_order(cells: Sequence[Cell]) -> list[Comparison]:
    """Every claim at every budget and in every mode that the cells speak of."""
    modes = dict.fromkeys(cell.mode for cell in cells)
    budgets = sorted({cell.token_budget for cell in cells if cell.token_budget is not None})
    found = [
        compare(cells, first, second, mode, budget) for mode in modes for first, second in CLAIMS for budget in budgets
    ]
    return [one for one in found if one is not None]


def summary(comparisons: Sequence[Comparison]) -> list[str]:
    """One sentence per mode: how many comparisons of the claims came out how."""
    lines = []
    for mode in dict.fromkeys(one.mode for one in comparisons):
        found = [one.verdict for one in comparisons if one.mode == mode]
        counts = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in get_args(Verdict))
        lines.append(f"{mode}: of {len(found)} comparisons (claim and budget) {counts}")
    return lines
