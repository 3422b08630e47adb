"""What every policy costs in answers at equal token budgets, on the shipped retrieval model.

    python -m benchmarks.accuracy

1,269 s of processor time, 31 minutes of wall time beside other work on two cores. Cells are kept in build/accuracy/
while it runs, so an interrupted run goes on where it stopped. Writes benchmarks/results/accuracy-MODEL.json,
docs/images/accuracy-*.png and, between its two marks, the tables of docs/results/accuracy.md. Nothing here depends on
which policy wins: the order of RocketKV's paper is reported pair by pair, with the error of each difference.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.accuracy import page as accuracy_page
from kvc_trt import policies
from kvc_trt.accuracy.answerers.policy_engines import open_model
from kvc_trt.accuracy.grid import DEFAULT_TASKS, MODES, question_groups, variants
from kvc_trt.accuracy.measure import QuestionDraw
from kvc_trt.accuracy.pages.published import paper_order
from kvc_trt.accuracy.pages.report import AccuracyReport
from kvc_trt.accuracy.run import evaluate, figures
from kvc_trt.atomic_files import write_whole
from kvc_trt.progress import progress_on

MODEL = "retrieval-text"
BUDGETS = (32, 64, 128)
LENGTHS = (512, 1024)
SAMPLES = 32
LONGEST_ANSWERS = {"niah-single-1": 8, "niah-multikey-2": 8, "lines": 8, "niah-multivalue": 40, "niah-multiquery": 40}
"""What the shipped model needs to answer: policies that evict spend their budget on the answer's room too."""
VARIATIONS = ("rocketkv:pool_kernel=63", "streaming-llm:positions=cache")
IMAGES = machine.ROOT / "docs" / "images"
PAGE = machine.ROOT / "docs" / "results" / "accuracy.md"
SPENT = "spent.json"
DRAWN = ("budget", "tasks", "depth-niah-single-1")
"""Figures of the page, by the beginning of their names; the report in build/accuracy/ holds all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="questions per task, length and mode")
    parser.add_argument("--fresh", action="store_true", help="measure again what build/accuracy/ holds")
    arguments = parser.parse_args()
    directory = machine.ROOT / "build" / "accuracy" / f"{MODEL}-{arguments.samples}"
    if arguments.fresh:
        (directory / "results.jsonl").unlink(missing_ok=True)
        (directory / SPENT).unlink(missing_ok=True)
    started, processor, before = time.monotonic(), time.process_time(), cells_in(directory)
    try:
        report = measured(directory, arguments.samples)
    finally:
        seconds, new = (time.monotonic() - started, time.process_time() - processor), cells_in(directory) - before
        spent = total_spent(directory, *seconds, machine.commit() if new else None)
    images = write_images(report)
    print(write_result(report, spent))
    print(accuracy_page.write(PAGE, report, images, record_of(spent), spent))
    print(f"{spent['seconds'] / 60:.1f} minutes, {spent['processor_seconds']} s of processor time, all runs together")
    print(f"the whole report: {directory / 'report.html'}")


def cells_in(directory: Path) -> int:
    """Lines of the results file: what is measured so far, and its head."""
    path = directory / "results.jsonl"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0


def total_spent(directory: Path, seconds: float, processor: float, commit: str | None) -> dict[str, Any]:
    """Time of this run and of those that it went on from, and the commits at which they measured cells, in their order:
    `commit` is this run's, if it measured any."""
    path = directory / SPENT
    before = json.loads(path.read_text()) if path.is_file() else {"seconds": 0, "processor_seconds": 0}
    spent = {
        "seconds": before["seconds"] + round(seconds),
        "processor_seconds": before["processor_seconds"] + round(processor),
        "commits": list(dict.fromkeys([*before.get("commits", []), *([commit] if commit else [])])),
    }
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spent))
    return spent


def record_of(spent: Mapping[str, Any]) -> dict[str, Any]:
    """The machine, and every commit that a cell was measured at: one changed tree among them makes all uncommitted."""
    commits = spent["commits"]
    changed = [commit for commit in commits if commit.endswith("-dirty")]
    return {**machine.record(), "commit": ", ".join([*(one for one in commits if one not in changed), *changed])}


def measured(directory: Path, samples: int) -> AccuracyReport:
    """Every policy at every budget, length and mode."""
    names = [*(one.name for one in policies.describe()), *VARIATIONS]
    draw = QuestionDraw(samples, 0, LONGEST_ANSWERS)
    progress = progress_on()
    with open_model(MODEL, progress=progress) as model:
        grid = question_groups(DEFAULT_TASKS, LENGTHS, MODES)
        return evaluate(model, variants(names, BUDGETS), grid, draw, directory, progress=progress)


def write_images(report: AccuracyReport) -> list[Path]:
    """The figures of the page, for the repository."""
    written = []
    for name, image in figures(report).items():
        if name.startswith(DRAWN):
            path = IMAGES / f"accuracy-{name}"
            write_whole(path, image)
            written.append(path)
    return written


def write_result(report: AccuracyReport, spent: dict[str, Any]) -> Path:
    """One line per cell, without single scores and parameters: those are in build/accuracy/."""
    settings = {key: value for key, value in report.settings.items() if value is not None}
    order = [
        {
            "first": one.first, "second": one.second, "mode": one.mode, "token_budget": one.token_budget,
            "difference": round(one.difference.value, 4), "standard_error": round(one.difference.standard_error, 4),
            "questions": one.difference.samples, "verdict": one.verdict,
        }
        for one in paper_order(report.cells)
    ]  # fmt: skip
    head = {"machine": record_of(spent), "settings": settings, "spent": spent, "order": order}
    text = json.dumps(head, indent=2)[:-2] + ',\n  "cells": [\n' + _lines([_compact(c.to_json()) for c in report.cells])
    path = machine.result_path(f"accuracy-{MODEL}", head["machine"])
    write_whole(path, f"{text}\n  ]\n}}\n".encode())
    return path


def _compact(cell: dict[str, Any]) -> dict[str, Any]:
    dropped = ("scores", "full_scores", "depths", "parameters", "seed", "family", "query_aware")
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in cell.items()}
    return {name: value for name, value in rounded.items() if name not in dropped and value not in (None, "")}


def _lines(cells: Sequence[dict[str, Any]]) -> str:
    return ",\n".join(f"    {json.dumps(cell)}" for cell in cells)


if __name__ == "__main__":
    main()
