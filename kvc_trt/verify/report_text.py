"""A report for people: aligned tables, the verdict last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from kvc_trt.verify.report import Check, ErrorFigures, Report, Rung, format_measured

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 160
_VERDICTS = {True: "ok", False: "FAILED", None: ""}
_FIGURES = {
    "max_logit_error": "max logit error",
    "mean_kl": "mean KL (nats)",
    "top1_agreement": "top-1 agreement",
    "first_divergence": "first divergence",
    "greedy_match": "greedy match",
}


def as_text(report: Report) -> str:
    """The whole report, at most `WIDTH` columns wide."""
    about = report.description
    title = f"verify {report.engine}: {about['policy']} on {about['model']}, {about['weights']} weights, {report.level}"
    parts = [title, _render(_ladder(report.rungs))]
    if any((report.halves.engine, report.halves.compression, report.halves.quantisation)):
        parts += ["The two halves of an engine's error (and what its weights cost)", _render(_halves(report))]
    parts += [*_lines(report), _verdict(report)]
    return "\n".join(parts)


def _ladder(rungs: Sequence[Rung]) -> Table:
    table = _table("rung", "check", "on", "measured", "bar", "", "detail")
    for rung in rungs:
        if not rung.checks:
            table.add_row(rung.name, rung.status, "", "", "", "", rung.reason)
        for number, check in enumerate(rung.checks):
            table.add_row(rung.name if number == 0 else "", *_cells(check))
    return table


def _cells(check: Check) -> tuple[str, ...]:
    measured = format_measured(check.measured)
    return check.name, check.sample, measured, check.bar, _VERDICTS[check.passed], check.detail


def _halves(report: Report) -> Table:
    halves = report.halves
    columns = {"engine": halves.engine, "compression": halves.compression, "quantisation": halves.quantisation}
    table = _table("", *columns)
    for field, label in _FIGURES.items():
        table.add_row(label, *(_figure(column, field) for column in columns.values()))
    return table


def _figure(column: ErrorFigures | None, field: str) -> str:
    if column is None:
        return "-"
    value = getattr(column, field)
    if field == "first_divergence":
        return "none" if value is None else f"step {value}"
    if value is not None and field in ("top1_agreement", "greedy_match"):
        return f"{value:.2%}"
    return format_measured(value)


def _lines(report: Report) -> Iterable[str]:
    kernels = report.description.get("kernels")
    yield f"run by {report.description['backend']}" + (f"; kernels: {kernels}" if kernels else "")
    for column, note in report.halves.notes.items():
        yield f"{column}: {note}"
    ties = report.near_ties
    yield (
        f"near-ties: {ties.lists_admitted} of {ties.lists_compared} index lists ({ties.tokens_swapped} tokens swapped, "
        f"each proven in float64); {ties.near_equal_tokens} tokens at near-equal logits"
    )
    if report.memory:
        peaks = ", ".join(f"{phase} {bytes_ / 2**20:.0f} MiB" for phase, bytes_ in report.memory.items())
        yield f"peak resident memory: {peaks}"
    for heading, items in (("finding", report.findings), ("left out", report.left_out)):
        for item in items:
            yield f"{heading}: {item}"


def _verdict(report: Report) -> str:
    if report.passed:
        return f"PASSED in {report.seconds:.1f} s"
    reasons = report.failures or ["nothing could be checked"]
    return "\n".join([f"FAILED in {report.seconds:.1f} s", *(f"  {reason}" for reason in reasons)])


def _table(*headers: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for header in headers:
        table.add_column(header, no_wrap=header != "detail", overflow="fold")
    return table


def _render(table: Table) -> str:
    from rich.console import Console

    buffer = StringIO()
    Console(file=buffer, width=WIDTH, color_system=None, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
