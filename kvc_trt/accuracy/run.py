"""One measurement from its start to its files: results kept while it runs, then HTML, CSV and figures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvc_trt.accuracy.csv_file import csv_bytes
from kvc_trt.accuracy.curves import average_curves, task_curves
from kvc_trt.accuracy.grid import Group, Variant, file_name
from kvc_trt.accuracy.heat_map import heat_map
from kvc_trt.accuracy.html_page import html_page
from kvc_trt.accuracy.measure import Sampling, measure
from kvc_trt.accuracy.report import AccuracyReport, Bars
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.subject import Subject
from kvc_trt.atomic_files import write_whole
from kvc_trt.profile.machine import machine_record
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.tasks.dataset import VERSION

RESULTS_FILE = "results.jsonl"
NO_BARS = Bars()


def evaluate(
    subject: Subject,
    variants: Sequence[Variant],
    groups: Sequence[Group],
    sampling: Sampling,
    output_directory: Path,
    *,
    bars: Bars = NO_BARS,
    progress: Progress | None = None,
) -> AccuracyReport:
    """Measure the grid, or what `output_directory` lacks of it, and write the report there.

    Bars that do not hold are in the report, not raised. InputError for a request that cannot be right and for a
    directory with results of other settings.
    """
    progress, started = progress or NullProgress(), time.monotonic()
    settings = {**subject.describe(), **vars(sampling), "tasks_version": VERSION}
    with Results(output_directory / RESULTS_FILE, settings) as results:
        if results.dropped:
            progress.note(f"{results.path}: its last line was cut short, and is measured again")
        cells = measure(subject, variants, groups, sampling, results, progress)
    report = AccuracyReport(settings, machine_record(), cells, bars, time.monotonic() - started)
    write_files(report, output_directory)
    return report


def write_files(report: AccuracyReport, directory: Path) -> list[Path]:
    """report.html, accuracy.csv and the figures; returns their paths."""
    images = figures(report)
    files = {"report.html": html_page(report, images), "accuracy.csv": csv_bytes(report.cells), **images}
    for name, content in files.items():
        write_whole(directory / name, content)
    return [directory / name for name in files]


def figures(report: AccuracyReport) -> dict[str, bytes]:
    """PNG images by file name: curves per mode, curves per task at the longest length, depth maps."""
    drawn: dict[str, bytes | None] = {}
    for mode in report.modes:
        drawn[f"budget-{mode}.png"] = average_curves(report, mode)
        drawn[f"tasks-{mode}.png"] = task_curves(report, mode, report.lengths[-1])
        for task in report.tasks:
            drawn[f"depth-{file_name(task)}-{mode}.png"] = heat_map(report, task, mode)
    return {name: image for name, image in drawn.items() if image is not None}
