"""The findings of an accuracy measurement: its cells, the evidence in them, and whether the bars hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvc_trt.accuracy.cell import ENOUGH_ANSWERED, Cell, Mean, mean
from kvc_trt.accuracy.grid import PLAIN, QuestionGroup, Variant
from kvc_trt.policies import BASELINE


@dataclass(frozen=True)
class Bars:
    """Thresholds of one measurement, recorded in its report; None judges nothing."""

    minimum_accuracy: float | None = None
    """Of the questions that the full cache answers, every cell that counts answers at least this share, 0..1.

    Where answers only overlap with right ones, it scores at least this share of the full cache's score."""
    maximum_loss: float | None = None
    """Over all questions, no cell that counts answers less than the full cache by more than this share, 0..1."""

    def failures(self, cells: Iterable[Cell]) -> list[str]:
        """One line per cell and bar that does not hold; one where bars were set and no cell counts."""
        if self.minimum_accuracy is None and self.maximum_loss is None:
            return []
        judged = [cell for cell in cells if cell.scores and cell.evidence and cell.policy != BASELINE]
        if not judged:
            few = f"the full cache answers fewer than {ENOUGH_ANSWERED} questions"
            return [f"no cell counts: {few}, no policy applies, or no answer is known to be right"]
        return [line for cell in judged for line in self._failures(cell)]

    def _failures(self, cell: Cell) -> Iterable[str]:
        where = f"{Variant(cell.policy, cell.token_budget)} on {cell.group}"
        kept, lost = cell.on_answered, cell.lost
        assert lost is not None  # of a cell that counts
        if self.minimum_accuracy is not None and kept is not None and kept.value < self.minimum_accuracy:
            of = f"of the {kept.samples} questions that the full cache answers"
            yield f"{where}: {kept} % {of}, expected at least {100 * self.minimum_accuracy:g} %"
        if self.minimum_accuracy is not None and kept is None:
            share = cell.mean.value / mean(cell.full_scores).value
            if share < self.minimum_accuracy:
                least = f"expected at least {100 * self.minimum_accuracy:g} %"
                yield f"{where}: {100 * share:.1f} % of the full cache's score, {least}"
        if self.maximum_loss is not None and lost.value > self.maximum_loss:
            yield f"{where}: {lost} points lost, expected at most {100 * self.maximum_loss:g}"


@dataclass(frozen=True)
class AccuracyReport:
    """Plain data; text, HTML, CSV and figures are made from it."""

    settings: Mapping[str, Any]
    """Settings of the measurement: model, checkpoint, weights, samples, seed."""
    machine: Mapping[str, Any]
    cells: Sequence[Cell]
    bars: Bars = Bars()
    seconds: float = 0.0

    @cached_property
    def failures(self) -> list[str]:
        """The reasons why the bars do not hold; empty if they hold."""
        return self.bars.failures(self.cells)

    @property
    def passed(self) -> bool:
        """True if something was answered, and the bars hold."""
        return not self.failures and any(cell.scores for cell in self.cells)

    @property
    def variants(self) -> list[Variant]:
        """Policies and budgets, in the order of the grid."""
        return list(dict.fromkeys(Variant(cell.policy, cell.token_budget) for cell in self.cells))

    @property
    def policies(self) -> list[str]:
        """Policies, in the order of the grid."""
        return list(dict.fromkeys(cell.policy for cell in self.cells))

    @property
    def budgets(self) -> list[int]:
        """Token budgets, ascending."""
        return sorted({cell.token_budget for cell in self.cells if cell.token_budget is not None})

    @property
    def lengths(self) -> list[int]:
        """Context lengths, ascending."""
        return sorted({cell.length for cell in self.cells})

    @property
    def modes(self) -> list[str]:
        """Modes, in the order of the grid."""
        return list(dict.fromkeys(cell.mode for cell in self.cells))

    @property
    def tasks(self) -> list[str]:
        """Tasks, in the order of the grid."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @property
    def not_learned(self) -> list[tuple[QuestionGroup, Mean]]:
        """Groups of which the full cache itself answers too few questions: nothing follows from them."""
        full = [cell for cell in self.cells if cell.policy == BASELINE and cell.scores]
        return [(cell.group, cell.mean) for cell in full if not cell.evidence and not cell.in_nats]

    @property
    def not_applicable(self) -> list[Cell]:
        """Cells without answers; each says why."""
        return [cell for cell in self.cells if not cell.scores]

    @property
    def framing(self) -> str:
        """The framing of all its questions; a measurement has only one."""
        return self.cells[0].framing if self.cells else PLAIN

    def group(self, task: str, mode: str, length: int) -> QuestionGroup:
        """A group of its questions."""
        return QuestionGroup(task, mode, length, self.framing)

    def cell(self, group: QuestionGroup, variant: Variant) -> Cell | None:
        """One cell, if the grid has it."""
        return self._by_key.get((group, variant))

    def average(self, mode: str, length: int, variant: Variant) -> tuple[Mean, int] | None:
        """Mean over the tasks that count, and how many they are; None where one of them has no answer."""
        groups = [self.group(task, mode, length) for task in self.tasks]
        cells = [cell for group in groups if (cell := self.cell(group, variant)) is not None and cell.evidence]
        if not cells or not all(cell.scores for cell in cells):
            return None
        if len({cell.samples for cell in cells}) == 1:  # the mean over samples is that over tasks
            return mean([score for cell in cells for score in cell.scores]), len(cells)
        means = [cell.mean for cell in cells]
        error = math.hypot(*(one.standard_error for one in means)) / len(means)
        value = math.fsum(one.value for one in means) / len(means)
        return Mean(value, error, sum(one.samples for one in means)), len(cells)

    def row_bytes(self, mode: str, length: int, variant: Variant) -> int | None:
        """The most bytes of cache that one sequence takes under a variant, over the tasks; None where none is known."""
        groups = (self.group(task, mode, length) for task in self.tasks)
        cells = (self.cell(group, variant) for group in groups)
        return max((cell.row_bytes for cell in cells if cell is not None and cell.row_bytes), default=None)

    def to_json(self) -> dict[str, Any]:
        """The report as plain dictionaries and lists, ready for `json.dumps`."""
        return {
            "passed": self.passed,
            "failures": self.failures,
            "thresholds": {**vars(self.bars), "answered_of_evidence": ENOUGH_ANSWERED},
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "cells": [cell.to_json() for cell in self.cells],
            "not_learned": [{**vars(group), "full_accuracy": full.value} for group, full in self.not_learned],
            "seconds": round(self.seconds, 1),
        }

    @cached_property
    def _by_key(self) -> dict[tuple[QuestionGroup, Variant], Cell]:
        return {(cell.group, Variant(cell.policy, cell.token_budget)): cell for cell in self.cells}
