"""A policy beside the full cache, question by question.

A real model does not answer every question with the full cache either. What it misses says nothing about a policy, so
a policy is also judged on the questions that the full cache answers, and by the difference of the two on all of them.
"""

from __future__ import annotations

from kvc_trt.accuracy.cell import Cell, Mean, mean, paired_difference

ANSWERED = 1.0
"""The score of a question that is answered: every value that was asked for."""


def on_answered(cell: Cell, full: Cell) -> Mean | None:
    """A policy's accuracy on the questions that the full cache answers; None where there is none of them.

    Both cells answer the same questions in the same order; a measurement that was cut short has more of the full
    cache's answers than of the other's, which are then left out.
    """
    if cell.scored_by != "answer" or full.scored_by != "answer":
        return None
    kept = [mine for mine, theirs in zip(cell.scores, full.scores, strict=False) if theirs >= ANSWERED]
    return mean(kept) if kept else None


def beside_full(cell: Cell, full: Cell) -> Mean | None:
    """The policy's scores minus the full cache's; None where no question was asked of both."""
    common = min(cell.samples, full.samples)
    return paired_difference(cell.scores[:common], full.scores[:common]) if common else None
