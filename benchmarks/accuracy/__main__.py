"""Accuracy of every policy at equal token budgets, on the shipped retrieval model.

    python -m benchmarks.accuracy

1,269 s of processor time, 31 minutes of wall time beside other work on two cores. Cells are kept in build/accuracy/
while it runs, so an interrupted run goes on where it stopped. Writes benchmarks/results/accuracy-MODEL.json,
docs/images/accuracy-*.png and, between its two marks, the tables of docs/results/accuracy.md. Nothing here depends on
which policy wins: the order of RocketKV's paper is reported pair by pair, with the error of each difference.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import machine, store
from benchmarks.accuracy import page as accuracy_page
from benchmarks.accuracy.page import DRAWN, MODEL, NAME, TAKEN
from benchmarks.accuracy.spent import SPENT, Spent, record_of
from benchmarks.page import IMAGES
from kvc_trt import policies
from kvc_trt.accuracy.draw import QuestionDraw
from kvc_trt.accuracy.grid import DEFAULT_TASKS, MODES, question_groups, variants
from kvc_trt.accuracy.pages.published import paper_order
from kvc_trt.accuracy.pages.report import AccuracyReport
from kvc_trt.accuracy.run import evaluate, figures
from kvc_trt.accuracy.under_test.policy_engines import open_model
from kvc_trt.files.atomic import write_whole
from kvc_trt.progress import progress_on

BUDGETS = (32, 64, 128)
LENGTHS = (512, 1024)
SAMPLES = 32
LONGEST_ANSWERS = {"niah-single-1": 8, "niah-multikey-2": 8, "lines": 8, "niah-multivalue": 40, "niah-multiquery": 40}
"""Tokens that the shipped model needs to answer; policies that evict spend their budget on the answer's room too."""
VARIATIONS = ("rocketkv:pool_kernel=63", "streaming-llm:positions=cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="questions per task, length and mode")
    parser.add_argument("--fresh", action="store_true", help="measure again what build/accuracy/ holds")
    arguments = parser.parse_args()
    directory = machine.ROOT / "build" / "accuracy" / f"{MODEL}-{arguments.samples}"
    if arguments.fresh:
        (directory / "results.jsonl").unlink(missing_ok=True)
        (directory / SPENT).unlink(missing_ok=True)
    with Spent(directory) as run:
        report = measured(directory, arguments.samples)
    spent = run.total
    write_images(report)
    path = write_result(report, spent)
    print(path)
    print(accuracy_page.write(store.read(path)))
    print(f"{spent['seconds'] / 60:.1f} minutes, {spent['processor_seconds']} s of processor time, all runs together")
    print(f"the whole report: {directory / 'report.html'}")


def measured(directory: Path, samples: int) -> AccuracyReport:
    """Return every policy at every budget, length and mode."""
    names = [*(one.name for one in policies.describe()), *VARIATIONS]
    draw = QuestionDraw(samples, 0, LONGEST_ANSWERS)
    progress = progress_on()
    with open_model(MODEL, progress=progress) as model:
        grid = question_groups(DEFAULT_TASKS, LENGTHS, MODES)
        return evaluate(model, variants(names, BUDGETS), grid, draw, directory, progress=progress)


def write_images(report: AccuracyReport) -> None:
    """The figures of the page, for the repository."""
    for name, image in figures(report).items():
        if name.startswith(DRAWN):
            write_whole(IMAGES / f"accuracy-{name}", image)


def write_result(report: AccuracyReport, spent: dict[str, Any]) -> Path:
    """Write the cells without single scores and parameters: those are in build/accuracy/."""
    settings = {key: value for key, value in report.settings.items() if value is not None}
    order = [
        {
            "first": one.first, "second": one.second, "mode": one.mode, "token_budget": one.token_budget,
            "difference": round(one.difference.value, 4), "standard_error": round(one.difference.standard_error, 4),
            "questions": one.difference.samples, "verdict": one.verdict,
        }
        for one in paper_order(report.cells)
    ]  # fmt: skip
    cells = [_compact(cell.to_json()) for cell in report.cells]
    head = {"machine": record_of(spent), "settings": settings, "spent": spent, "degrees_taken": TAKEN, "order": order}
    return store.write_result(NAME, {**head, "cells": cells})


def _compact(cell: dict[str, Any]) -> dict[str, Any]:
    dropped = ("scores", "full_scores", "depths", "parameters", "seed", "family", "query_aware")
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in cell.items()}
    return {name: value for name, value in rounded.items() if name not in dropped and value not in (None, "")}


if __name__ == "__main__":
    main()
