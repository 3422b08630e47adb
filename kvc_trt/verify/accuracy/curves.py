"""Accuracy against token budget, one line per policy, with standard errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvc_trt.verify.accuracy.figure import new_figure, png
from kvc_trt.verify.accuracy.grid import FULL, Group, Variant
from kvc_trt.verify.accuracy.report import AccuracyReport
from kvc_trt.verify.accuracy.statistics import Mean
from kvc_trt.verify.accuracy.style import style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS_PER_ROW = 3
Figures = Callable[[Variant], Mean | None]
"""What one variant reached in one panel; None where it does not apply."""


def average_curves(report: AccuracyReport, mode: str) -> bytes | None:
    """A panel per length: the mean over tasks that count. PNG; None where nothing counts."""
    panels = [
        (f"{length:,} tokens, mean over tasks ({tasks})", _averages(report, mode, length))
        for length in report.lengths
        if (tasks := _tasks_that_count(report, mode, length))
    ]
    return _draw(report, f"{_model(report)}: accuracy against token budget, {mode}", panels)


def task_curves(report: AccuracyReport, mode: str, length: int) -> bytes | None:
    """A panel per task that counts at one length. PNG; None where there is none."""
    panels = [
        (task, _of_group(report, Group(task, mode, length)))
        for task in report.tasks
        if (full := report.cell(Group(task, mode, length), Variant(FULL, None))) is not None and full.evidence
    ]
    return _draw(report, f"{_model(report)}: accuracy by task, {length:,} tokens, {mode}", panels)


def _tasks_that_count(report: AccuracyReport, mode: str, length: int) -> int:
    found = report.average(mode, length, Variant(FULL, None))
    return 0 if found is None else found[1]


def _averages(report: AccuracyReport, mode: str, length: int) -> Figures:
    def of(variant: Variant) -> Mean | None:
        found = report.average(mode, length, variant)
        return None if found is None else found[0]

    return of


def _of_group(report: AccuracyReport, group: Group) -> Figures:
    def of(variant: Variant) -> Mean | None:
        cell = report.cell(group, variant)
        return cell.mean if cell is not None and cell.scores else None

    return of


def _draw(report: AccuracyReport, title: str, panels: Sequence[tuple[str, Figures]]) -> bytes | None:
    if not panels or not report.budgets:
        return None
    columns = min(_PANELS_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.2 * columns + 0.6, 3.1 * rows + 1.6)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (heading, figures) in zip(grid.flat, panels, strict=False):
        _panel(axes, report, heading, figures)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy, %")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    for axes in grid.flat[1 : len(panels)]:  # a policy may apply in one panel only
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(
        handles, labels, frameon=False, fontsize="small", ncols=min(6, 2 * columns), loc="outside lower center"
    )
    figure.suptitle(title, fontsize="medium")
    return png(figure)


def _panel(axes: Axes, report: AccuracyReport, heading: str, figures: Figures) -> None:
    if (full := figures(Variant(FULL, None))) is not None:
        axes.axhline(100 * full.value, color="black", linewidth=1, linestyle=(0, (1, 1)), label=FULL)
    for policy in report.policies:
        if policy == FULL:
            continue
        points = [(budget, found) for budget in report.budgets if (found := figures(Variant(policy, budget)))]
        if not points:
            continue
        style = style_of(policy)
        axes.errorbar(
            [budget for budget, _ in points],
            [100 * found.value for _, found in points],
            yerr=[100 * found.standard_error for _, found in points],
            color=style.colour, marker=style.marker, linestyle=style.line, label=policy,
            markersize=4.5, linewidth=1.3, capsize=2, alpha=0.9,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(report.budgets, [f"{budget:,}" for budget in report.budgets])
    axes.minorticks_off()
    axes.set_ylim(-4, 104)
    axes.set_xlabel("token budget")
    axes.set_title(heading, fontsize="small")
    axes.grid(visible=True, which="major", alpha=0.3)


def _model(report: AccuracyReport) -> str:
    return str(report.settings.get("model", "model"))
