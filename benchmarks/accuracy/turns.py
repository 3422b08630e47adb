"""Accuracy of every policy on late questions: a second question, and a question about a stored context.

    python -m benchmarks.accuracy.turns --models retrieval-tiny
    python -m benchmarks.accuracy.turns --models smollm2-135m-instruct [--checkpoint FILE.gguf] [--minutes 20]

Every sample is asked in several forms (`kvc_trt.tasks.kinds.two_questions`): its question at the end of the prompt, as
a turn after another question was answered, as a turn right after the context was compacted and, where a model is small,
by decode steps after that. Results are kept in build/accuracy/, some questions at a time, so a run that was stopped
goes on where it was. Writes benchmarks/results/accuracy-turns-MODEL.json; the page is
`benchmarks.accuracy.turns_page`'s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, store
from benchmarks.accuracy.spent import Spent, record_of
from kvc_trt import policies
from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.draw import QuestionDraw
from kvc_trt.accuracy.grid import (
    ALL_MODES,
    CHAT,
    PLAIN,
    SECOND_QUESTION,
    STORED_CONTEXT,
    QuestionGroup,
    Variant,
    question_groups,
    variants,
)
from kvc_trt.accuracy.measure import measure
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.run import RESULTS_FILE
from kvc_trt.accuracy.under_test.policy_engines import open_model
from kvc_trt.progress import progress_on
from kvc_trt.tasks.dataset import VERSION

NAME = "accuracy-turns"
SEED = 0
BLOCK = 8
"""Questions of each form that are asked before the other forms' next ones."""


@dataclass(frozen=True)
class Asked:
    """The questions for one model."""

    task: str
    length: int
    """Tokens of prompt and first answer."""
    budget: int
    samples: int
    framing: str = PLAIN
    max_new_tokens: int | None = None
    modes: tuple[str, ...] = ALL_MODES
    """The forms."""
    also: tuple[str, ...] = ()
    """Policies with a constant fixed that is otherwise derived from the engine's length, which the forms need more or
    less of."""

    @property
    def groups(self) -> list[QuestionGroup]:
        """The questions in every form."""
        return question_groups([self.task], [self.length], self.modes, (self.framing,))

    @property
    def variants(self) -> list[Variant]:
        """Every policy that engines run."""
        names = [one.name for one in policies.describe() if not policies.named(one.name).selection.oracle]
        return variants([*names, *self.also], [self.budget])


MODELS = {
    "retrieval-tiny": Asked("two-records", 512, 128, 128),
    "smollm2-135m-instruct": Asked(
        "two-needles",
        1024,
        256,
        64,
        CHAT,
        12,
        ("query-aware", SECOND_QUESTION, STORED_CONTEXT),
        ("hybrid:page_size=2", "hybrid:page_size=3"),
    ),
}


def main() -> None:
    """Measure the models and write a result of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--minutes", type=float, help="ask a model nothing new after this time")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.models if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]}; there are {', '.join(MODELS)}")
    for name in arguments.models:
        print(measured(name, arguments.checkpoint, arguments.minutes))


def measured(name: str, checkpoint: str | None, minutes: float | None) -> Path:
    """Ask the questions that the kept results lack, and write the result."""
    asked, directory = MODELS[name], machine.ROOT / "build" / "accuracy" / f"{NAME}-{name}"
    until = None if minutes is None else time.monotonic() + 60 * minutes
    draw, progress = QuestionDraw(asked.samples, SEED, asked.max_new_tokens), progress_on()
    with Spent(directory) as run, open_model(name, checkpoint=checkpoint, progress=progress) as model:
        settings = {**model.describe(), **vars(draw), "tasks_version": VERSION}
        with Results(directory / RESULTS_FILE, settings) as results:
            # A few questions in every form before the next ones, so that an interrupted run has as many of each.
            for count in range(BLOCK, asked.samples + BLOCK, BLOCK):
                some = QuestionDraw(asked.samples, SEED, asked.max_new_tokens, count)
                cells = measure(model, asked.variants, asked.groups, some, results, progress, until=until)
    return write_result(name, settings, cells, run.total)


def write_result(name: str, settings: dict[str, Any], cells: Sequence[Cell], spent: dict[str, Any]) -> Path:
    """Write the cells with the score of every question."""
    head = {"machine": record_of(spent), "settings": settings, "spent": spent}
    return store.write_result(f"{NAME}-{name}", {**head, "cells": [compact_cell(cell) for cell in cells]})


def compact_cell(cell: Cell) -> dict[str, Any]:
    """Return the fields of a cell to store: its place in the grid, and the score of every question."""
    kept = ("task", "mode", "length", "policy", "token_budget", "framing", "dataset", "max_new_tokens", "row_bytes")
    stored = cell.to_json()
    found = {key: stored[key] for key in kept if stored[key] is not None}
    return {**found, "reason": cell.reason} if cell.reason else {**found, "scores": [int(one) for one in cell.scores]}


if __name__ == "__main__":
    main()
