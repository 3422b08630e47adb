"""One measurement from its start to its files: results kept while it runs, then HTML, CSV and figures."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvc_trt.accuracy.cell import Cell, interval
from kvc_trt.accuracy.draw import Draw
from kvc_trt.accuracy.grid import QuestionGroup, Variant, file_name
from kvc_trt.accuracy.measure import lacking, measure
from kvc_trt.accuracy.pages.figures import average_curves, memory_curves, task_curves
from kvc_trt.accuracy.pages.heat_map import heat_map
from kvc_trt.accuracy.pages.html_page import html_page
from kvc_trt.accuracy.pages.report import AccuracyReport, Bars
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.under_test.model_under_test import ModelUnderTest
from kvc_trt.files.atomic import write_together
from kvc_trt.machine import machine_record
from kvc_trt.progress import NullProgress, Progress

RESULTS_FILE = "results.jsonl"
NO_BARS = Bars()
COLUMNS = (
    "task", "family", "mode", "query_aware", "length", "policy", "token_budget", "samples", "accuracy",
    "divergence", "divergence_low", "divergence_high", "equal_tokens", "standard_error", "low", "high",
    "full_accuracy", "evidence", "row_bytes", "executor", "max_new_tokens", "seed", "dataset", "reason",
)  # fmt: skip


def evaluate(
    model: ModelUnderTest,
    variants: Sequence[Variant],
    groups: Sequence[QuestionGroup],
    draw: Draw,
    output_directory: Path,
    *,
    bars: Bars = NO_BARS,
    progress: Progress | None = None,
) -> AccuracyReport:
    """Measure the cells of the grid that `output_directory` lacks, and write the report there.

    Bars that do not hold are in the report, not raised. InputError for a request that cannot be right and for a
    directory with results of other settings.
    """
    progress, started = progress or NullProgress(), time.monotonic()
    settings = {**model.describe(), **draw.settings()}
    with Results(output_directory / RESULTS_FILE, settings) as results:
        if results.dropped:
            progress.note(f"{results.path}: its last line was cut short, and is measured again")
        answers = sum(map(sum, lacking(variants, groups, draw, results).values()))
        progress.note(f"{answers:,} answers to give, by {len(variants)} policies and budgets")
        cells = measure(model, variants, groups, draw, results, progress)
    report = AccuracyReport(settings, machine_record(), cells, bars, time.monotonic() - started)
    write_files(report, output_directory)
    return report


def write_files(report: AccuracyReport, directory: Path) -> list[Path]:
    """Write the figures, accuracy.csv and report.html, the sign that all of them are there; return their paths."""
    images = figures(report)
    files = {**images, "accuracy.csv": csv_bytes(report.cells), "report.html": html_page(report, images)}
    write_together(directory, files)
    return [directory / name for name in files]


def figures(report: AccuracyReport) -> dict[str, bytes]:
    """PNG images by file name: curves per mode, curves per task at the longest length, depth maps."""
    drawn: dict[str, bytes | None] = {}
    for mode in report.modes:
        drawn[f"memory-{mode}.png"] = memory_curves(report, mode)
        drawn[f"budget-{mode}.png"] = average_curves(report, mode)
        drawn[f"tasks-{mode}.png"] = task_curves(report, mode, report.lengths[-1])
        for task in report.tasks:
            drawn[f"depth-{file_name(task)}-{mode}.png"] = heat_map(report, task, mode)
    return {name: image for name, image in drawn.items() if image is not None}


def csv_bytes(cells: Iterable[Cell]) -> bytes:
    """One line per cell; accuracies are shares, `low` and `high` a 95 % interval. A column that does not apply is
    empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows({**cell.to_json(), **_interval(cell)} for cell in cells)
    return text.getvalue().encode()


def _interval(cell: Cell) -> dict[str, Any]:
    if not cell.scores or cell.in_nats:
        return {}
    low, high = interval(cell.mean.value, cell.samples)
    return {"low": round(low, 4), "high": round(high, 4)}
