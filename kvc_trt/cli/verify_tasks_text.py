"""A measurement of accuracy as a person reads it at a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.cli.output import table
from kvc_trt.sizes import readable_size

if TYPE_CHECKING:
    from kvc_trt.accuracy.cell import Cell
    from kvc_trt.accuracy.report import AccuracyReport


def accuracy_text(report: AccuracyReport, directory: Path) -> str:
    """One table per mode and length, a row per policy and budget; then what does not count, and where the files are."""
    tables = [_table(report, mode, length) for mode in report.modes for length in report.lengths]
    return "\n\n".join([_head(report), *tables, "\n".join([*_notes(report), f"report: {directory / 'report.html'}"])])


def _head(report: AccuracyReport) -> str:
    settings = report.settings
    return (
        f"accuracy of {settings['model']}, {settings['weights']} weights, {settings['backend']}: greedy answers, "
        f"percent ± standard error, n = {settings['samples']} per cell, seed {settings['seed']}"
    )


def _table(report: AccuracyReport, mode: str, length: int) -> str:
    from kvc_trt.accuracy.grid import Group

    rows = []
    for variant in report.variants:
        cells = [report.cell(Group(task, mode, length), variant) for task in report.tasks]
        average = report.average(mode, length, variant)
        stored = next((cell.row_bytes for cell in cells if cell is not None and cell.row_bytes), None)
        rows.append(
            [
                variant.policy,
                "-" if variant.token_budget is None else f"{variant.token_budget:,}",
                "-" if stored is None else readable_size(stored),
                *map(_cell, cells),
                "n/a" if average is None else str(average[0]),
            ]
        )
    headers = ["policy", "budget", "cache/row", *report.tasks, "mean"]
    return f"{mode}, {length:,} tokens\n{table(headers, rows, right=range(1, len(headers)))}"


def _cell(cell: Cell | None) -> str:
    if cell is None or not cell.scores:
        return "n/a"
    return f"{cell.mean}" + ("" if cell.evidence else " *")


def _notes(report: AccuracyReport) -> Iterable[str]:
    from kvc_trt.accuracy.cell import EVIDENCE
    from kvc_trt.accuracy.grid import Variant

    if report.not_learned:
        yield f"* not learned: the full cache answers less than {EVIDENCE:.0%}, and the cell does not count"
    reasons: dict[str, list[str]] = {}
    for cell in report.not_applicable:
        variant = str(Variant(cell.policy, cell.token_budget))
        if variant not in (known := reasons.setdefault(cell.reason, [])):
            known.append(variant)
    for reason, variants in reasons.items():
        yield f"n/a: {', '.join(variants)}: {reason}"
    bars = {name.replace("_", " "): value for name, value in vars(report.bars).items() if value is not None}
    if bars:
        yield "thresholds: " + ", ".join(f"{name} {value:.1%}" for name, value in bars.items())
        yield from (f"FAILED: {line}" for line in report.failures)
        yield "PASSED" if report.passed else f"FAILED: {len(report.failures)} of the bars do not hold"
