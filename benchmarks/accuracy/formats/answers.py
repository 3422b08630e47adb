"""What caches in every format answer, on the questions that policies are compared by.

    python -m benchmarks.accuracy.formats.answers [--checkpoint FILE.gguf] [--groups needles,keys] [--minutes 60]

Asks SmolLM2-135M-Instruct the questions of `benchmarks.accuracy.smollm2.stages`, with the same samples: a needle in the
prompt, the same asked after compaction, the same as plain text, one of several keys, and the likelihood of a summary.
One prefill serves every method and budget in one format; formats are asked in turn, because the engines of all of them
would take 18 GB. What is measured is kept in build/accuracy/, a few questions at a time, so a run that was stopped goes
on where it was. Writes benchmarks/results/formats-answers.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from benchmarks import machine, store
from benchmarks.accuracy.formats.divergence import METHODS, in_format
from benchmarks.accuracy.smollm2.grid import MODEL, SEED, compact
from benchmarks.accuracy.smollm2.stages import BUDGETS, CORE, LONGEST_ANSWERS, SAMPLES, Stage
from benchmarks.accuracy.spent import Spent, record_of
from kvc_trt.accuracy.answerers.policy_engines import PolicyEngines, open_model
from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.draw import QuestionDraw
from kvc_trt.accuracy.measure import measure
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.run import RESULTS_FILE
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.progress import progress_on
from kvc_trt.tasks.dataset import VERSION

NAME = "formats-answers"
GROUPS = ("needles", "late-needles", "plain", "keys", "likelihood")


def stage(name: str, form: str) -> Stage:
    """Return a group's questions, asked of every method in one format."""
    return replace(CORE[name], policies=tuple(in_format(METHODS, form)))


def measured(model: PolicyEngines, names: Sequence[str], samples: int, until: float | None) -> list[Cell]:
    """Return every cell that is known, after asking what these groups lack."""
    settings = {**model.describe(), "samples": samples, "seed": SEED, "max_new_tokens": LONGEST_ANSWERS}
    draw, progress = QuestionDraw(samples, SEED, LONGEST_ANSWERS), progress_on()
    path = machine.ROOT / "build" / "accuracy" / NAME / RESULTS_FILE
    with Results(path, {**settings, "tasks_version": VERSION}) as results:
        for name, form in product(names, CACHE_FORMATS):
            progress.note(f"group {name} in {form}")
            asked = stage(name, form)
            measure(model, asked.variants, asked.groups, draw, results, progress, until=until)
        return list(results.cells.values())


def main() -> None:
    """Ask, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--groups", type=lambda text: text.split(","), default=list(GROUPS))
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"questions of a group (default {SAMPLES})")
    parser.add_argument("--minutes", type=float, help="ask nothing new after so many")
    arguments = parser.parse_args()
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    with (
        open_model(arguments.model, checkpoint=arguments.checkpoint, progress=progress_on()) as model,
        Spent(machine.ROOT / "build" / "accuracy" / NAME) as run,
    ):
        cells = measured(model, arguments.groups, arguments.samples, until)
        head = {"settings": {**model.describe(), "samples": arguments.samples, "budgets": list(BUDGETS)}}
    result = {"machine": record_of(run.total), **head, "spent": run.total}
    print(store.write_result(NAME, {**result, "cells": [compact(cell.to_json()) for cell in cells]}))


if __name__ == "__main__":
    main()
