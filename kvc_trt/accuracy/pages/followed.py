"""Compare caches, prompt by prompt, by how closely they follow the whole one; some may not differ beyond chance."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.faithfulness import bootstrap_interval
from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.pages.report import AccuracyReport
from kvc_trt.policies import BASELINE

Interval = tuple[float, float]
"""A 95 % interval of a mean over prompts, by bootstrap."""


@dataclass(frozen=True)
class Followed:
    """The figures by which one variant follows the whole cache on one group of questions."""

    cell: Cell
    divergence: Interval
    equal: Interval
    differing: int
    """Answers in which some token is another."""
    first_difference: float | None
    """The median place of the first such token, among these answers, from 0."""
    behind: Interval | None
    """Divergence minus that of the closest variant, prompt by prompt; None for that variant itself."""

    @property
    def variant(self) -> Variant:
        """The policy and its budget."""
        return Variant(self.cell.policy, self.cell.token_budget)

    @property
    def mean_equal(self) -> float:
        """The mean share of tokens that both caches find most likely."""
        return statistics.fmean(self.cell.equal)

    @property
    def distinguishable(self) -> bool:
        """True if the closest variant is closer by more than chance explains."""
        return self.behind is not None and self.behind[0] > 0


def followed(report: AccuracyReport) -> list[tuple[QuestionGroup, list[Followed]]]:
    """Every group without right answers, and its variants, the closest first."""
    cells: dict[QuestionGroup, list[Cell]] = {}
    for cell in report.cells:
        if cell.scored_by == "faithfulness" and cell.scores and (cell.policy, cell.token_budget) != (BASELINE, None):
            cells.setdefault(cell.group, []).append(cell)
    return [(group, list(_ordered(found))) for group, found in cells.items()]


def _ordered(cells: Sequence[Cell]) -> Iterable[Followed]:
    ordered = sorted(cells, key=lambda cell: cell.mean.value)
    for cell in ordered:
        interval = cell.divergence_interval
        assert interval is not None  # it has scores
        places = [place for place in cell.first_differences if place is not None]
        yield Followed(
            cell,
            interval,
            bootstrap_interval(cell.equal),
            len(places),
            statistics.median(places) if places else None,
            None if cell is ordered[0] else _difference(cell.scores, ordered[0].scores),
        )


def _difference(scores: Sequence[float], closest: Sequence[float]) -> Interval:
    """The interval of the mean difference, over the prompts that both were asked."""
    return bootstrap_interval([mine - theirs for mine, theirs in zip(scores, closest, strict=False)])
