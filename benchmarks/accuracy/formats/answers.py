"""Answers from caches in every format, to the questions that policies are compared by.

    python -m benchmarks.accuracy.formats.answers [--checkpoint FILE.gguf] [--groups needles,keys] [--minutes 60]

Asks SmolLM2-135M-Instruct the questions of `benchmarks.accuracy.smollm2.stages`, with the same samples: a needle in the
prompt, the same asked after compaction, the same as plain text, one of several keys, and the likelihood of a summary.
One prefill serves every method, budget and format. All groups are asked a few questions before any is asked more, so
that a run that was stopped has about as many answers in each. Results are kept in build/accuracy/, and the next run
goes on there. Writes benchmarks/results/formats-answers.json after every few questions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks import machine, store
from benchmarks.accuracy.formats.methods import METHODS, in_every_format
from benchmarks.accuracy.smollm2.grid import MODEL, SEED, compact
from benchmarks.accuracy.smollm2.stages import CORE, LONGEST_ANSWERS, SAMPLES
from benchmarks.accuracy.spent import Spent, record_of
from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.draw import QuestionDraw
from kvc_trt.accuracy.grid import QuestionGroup, Variant, variants
from kvc_trt.accuracy.measure import measure
from kvc_trt.accuracy.questions import ModelVocabulary
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.run import RESULTS_FILE
from kvc_trt.accuracy.under_test.policy_engines import PolicyEngines, open_model
from kvc_trt.progress import progress_on
from kvc_trt.tasks.dataset import VERSION, DataSet

NAME = "formats-answers"
FOLDER = machine.ROOT / "build" / "accuracy" / NAME
BUDGETS = (128, 512)
GROUPS = ("needles", "late-needles", "plain", "keys", "likelihood")
EACH = 16
"""Questions that a group is asked before the next one is."""
TOGETHER = 1 << 15
"""Prompt tokens of the questions that one cache answers together: EACH of 2,048."""


@dataclass(frozen=True)
class OneDraw(QuestionDraw):
    """Questions that are drawn once, however often a group is asked some more of them."""

    drawn: dict[QuestionGroup, DataSet] = field(default_factory=dict, compare=False)

    def data_set(self, group: QuestionGroup, vocabulary: ModelVocabulary) -> DataSet:
        """Return all samples of a group."""
        if group not in self.drawn:
            self.drawn[group] = super().data_set(group, vocabulary)
        return self.drawn[group]


def compared() -> list[Variant]:
    """Return every method in every format at every budget, the whole fp32 cache first."""
    return variants(in_every_format(METHODS), BUDGETS)


def measured(model: PolicyEngines, names: Sequence[str], draw: OneDraw, until: float | None) -> list[Cell]:
    """Return every known cell, after asking the questions of these groups that the draw still lacks."""
    settings = {**model.describe(), "samples": draw.samples, "seed": draw.seed, "max_new_tokens": draw.max_new_tokens}
    progress, asked = progress_on(), compared()
    with Results(FOLDER / RESULTS_FILE, {**settings, "tasks_version": VERSION}) as results:
        for name in names:
            measure(model, asked, CORE[name].groups, draw, results, progress, until=until, tokens_at_once=TOGETHER)
        return list(results.cells.values())


def main() -> None:
    """Ask, and write the result as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--groups", type=lambda text: text.split(","), default=list(GROUPS))
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"questions of a group (default {SAMPLES})")
    parser.add_argument("--asked", type=int, help="ask the first ones of them only; the next run may ask more")
    parser.add_argument("--minutes", type=float, help="ask nothing new after this time")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.groups if name not in GROUPS]:
        parser.error(f"unknown group {unknown[0]}; there are {', '.join(GROUPS)}")
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    samples = arguments.samples
    draw = OneDraw(samples, SEED, LONGEST_ANSWERS)
    with open_model(arguments.model, checkpoint=arguments.checkpoint, threads=1, progress=progress_on()) as model:
        head = {"settings": {**model.describe(), "samples": samples, "seed": SEED, "budgets": list(BUDGETS)}}
        last = min(samples, arguments.asked or samples)
        for asked in (min(one, last) for one in range(EACH, last + EACH, EACH)):
            if until is not None and time.monotonic() >= until:
                break
            with Spent(FOLDER) as run:
                cells = measured(model, arguments.groups, replace(draw, asked=asked), until)
            result = {"machine": record_of(run.total), **head, "spent": run.total}
            path = store.write_result(NAME, {**result, "cells": [compact(cell.to_json()) for cell in cells]})
            progress_on().note(f"{path}: {asked} questions of each group")


if __name__ == "__main__":
    main()
