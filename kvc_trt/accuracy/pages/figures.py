"""Accuracy against token budget, one line per policy, with standard errors; and how every figure looks.

Against token budgets a policy has the same colour, marker and line whatever else is drawn. Against memory all policies
are in one picture, so there these follow from its place among them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from kvc_trt import policies
from kvc_trt.accuracy.cell import Mean
from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.pages.report import AccuracyReport
from kvc_trt.pages.chart import COLOURS
from kvc_trt.policies import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_DOTS_PER_INCH = 130
CHOOSES, DROPS = "choose what a step reads", "drop what no step will read again"
"""The two kinds of policies; those that do both are drawn with the first."""
_MARKERS = "osD^vPX*<>hp"
_LINES = ("-", "--", ":", "-.")
_MIB = 1 << 20
_APART = 0.03
"""Distance between policies at one budget, in doublings, so that equal accuracies do not hide each other."""
Figures = Callable[[Variant], Mean | None]
"""The score of one variant in one panel; None where it does not apply."""
Panels = Sequence[tuple[str, Figures]]


class Style(NamedTuple):
    """Colour, marker and line of one policy."""

    colour: str
    marker: str
    line: str


def kind_of(policy: str) -> str:
    """CHOOSES or DROPS; a policy that the registry does not know drops."""
    name = policy.partition(":")[0]
    known = name in {one.name for one in policies.describe()}
    return CHOOSES if known and policies.named(name).selection.reads_a_part else DROPS


def style_of(policy: str) -> Style:
    """Choose the style by the policy's place among those of its kind: colours repeat after seven, with another line and
    marker."""
    place = _places().get(policy.partition(":")[0], 0) + (len(COLOURS) + 3 if ":" in policy else 0)
    count = len(COLOURS)
    return Style(COLOURS[place % count], _MARKERS[place % len(_MARKERS)], _LINES[place // count % len(_LINES)])


@cache
def _places() -> Mapping[str, int]:
    names = [one.name for one in policies.describe() if one.name != BASELINE]
    return {
        name: place
        for kind in (CHOOSES, DROPS)
        for place, name in enumerate(name for name in names if kind_of(name) == kind)
    }


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches that lays itself out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """The figure's PNG; equal figures give equal bytes (no date, no version inside)."""
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def average_curves(report: AccuracyReport, mode: str) -> bytes | None:
    """A panel per length: the mean over tasks that count. PNG; None where nothing counts."""
    panels = [
        (f"{length:,} tokens, mean over tasks ({tasks})", _averages(report, mode, length))
        for length in report.lengths
        if (tasks := _tasks_that_count(report, mode, length))
    ]
    return _draw(report, f"{_model(report)}: accuracy against token budget, {mode}", panels)


def memory_curves(report: AccuracyReport, mode: str) -> bytes | None:
    """A panel per length: the mean over tasks that count, against the MiB that one sequence's cache takes.

    All policies are in one picture, so that they can be compared whatever they save. PNG; None where nothing counts.
    """
    lengths = [length for length in report.lengths if _tasks_that_count(report, mode, length)]
    names = [policy for policy in report.policies if policy != BASELINE]
    if not lengths or not names:
        return None
    figure = new_figure(4.3 * len(lengths) + 2.6, max(4.2, 0.21 * len(names) + 1.2))
    figure.suptitle(f"{_model(report)}: accuracy against memory, {mode}", fontsize="medium")
    row = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    handles = {}
    for axes, length in zip(row, lengths, strict=True):
        _memory_panel(axes, report, names, mode, length)
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    row[0].set_ylabel("accuracy, %", fontsize="small")
    ordered = [label for label in (BASELINE, *names) if label in handles]
    figure.legend(
        [handles[label] for label in ordered], ordered, frameon=False, fontsize="small", loc="outside right center"
    )
    return png(figure)


def _memory_panel(axes: Axes, report: AccuracyReport, names: Sequence[str], mode: str, length: int) -> None:
    full, figures = Variant(BASELINE, None), _averages(report, mode, length)
    for place, policy in enumerate([BASELINE, *names]):
        found = [
            (size / _MIB, mean)
            for variant in report.variants
            if variant.policy == policy and (size := report.row_bytes(mode, length, variant))
            and (mean := figures(variant)) is not None
        ]  # fmt: skip
        if not found:
            continue
        found.sort(key=lambda point: point[0])
        style = Style("black", "*", "") if policy == full.policy else _among_all(place - 1)
        axes.errorbar(
            [size for size, _ in found],
            [100 * mean.value for _, mean in found],
            yerr=[100 * mean.standard_error for _, mean in found],
            color=style.colour, marker=style.marker, linestyle=style.line, label=policy,
            markersize=9 if policy == full.policy else 5.5, linewidth=1.1, capsize=2, alpha=0.85,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.3g}")
    axes.set_ylim(-4, 104)
    axes.tick_params(labelsize="small")
    axes.set_xlabel("MiB of cache per sequence", fontsize="small")
    axes.set_title(f"{length:,} tokens, mean over tasks ({_tasks_that_count(report, mode, length)})", fontsize="small")
    axes.grid(visible=True, which="major", alpha=0.3)


def _among_all(place: int) -> Style:
    """The style of one policy among all, of both kinds: no two of them look alike."""
    count = len(COLOURS)
    return Style(COLOURS[place % count], _MARKERS[(place // count + place) % len(_MARKERS)], _LINES[place // count % 4])


def task_curves(report: AccuracyReport, mode: str, length: int) -> bytes | None:
    """A panel per task that counts at one length. PNG; None where there is none."""
    panels = [
        (task, _of_group(report, report.group(task, mode, length)))
        for task in report.tasks
        if (full := report.cell(report.group(task, mode, length), Variant(BASELINE, None))) is not None
        and full.evidence
    ]
    return _draw(report, f"{_model(report)}: accuracy by task, {length:,} tokens, {mode}", panels)


def _tasks_that_count(report: AccuracyReport, mode: str, length: int) -> int:
    found = report.average(mode, length, Variant(BASELINE, None))
    return 0 if found is None else found[1]


def _averages(report: AccuracyReport, mode: str, length: int) -> Figures:
    def of(variant: Variant) -> Mean | None:
        found = report.average(mode, length, variant)
        return None if found is None else found[0]

    return of


def _of_group(report: AccuracyReport, group: QuestionGroup) -> Figures:
    def of(variant: Variant) -> Mean | None:
        cell = report.cell(group, variant)
        return cell.mean if cell is not None and cell.scores else None

    return of


def _draw(report: AccuracyReport, title: str, panels: Panels) -> bytes | None:
    """Two rows of panels, one for each kind of policy, with a legend each."""
    kinds = {
        kind: names
        for kind in (CHOOSES, DROPS)
        if (names := [policy for policy in report.policies if policy != BASELINE and kind_of(policy) == kind])
    }
    if not panels or not kinds or not report.budgets:
        return None
    figure = new_figure(2.9 * len(panels) + 2.6, 3.3 * len(kinds) + 0.5)
    figure.suptitle(title, fontsize="medium")
    for part, (kind, names) in zip(figure.subfigures(len(kinds), squeeze=False)[:, 0], kinds.items(), strict=True):
        _row(part, report, kind, names, panels)
    return png(figure)


def _row(part: SubFigure, report: AccuracyReport, kind: str, names: Sequence[str], panels: Panels) -> None:
    """One panel per heading, and the legend at the right."""
    part.suptitle(f"policies that {kind}", fontsize="small")
    row = part.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    handles = {}
    for axes, (heading, figures) in zip(row, panels, strict=True):
        _panel(axes, report, names, heading, figures)
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    row[0].set_ylabel("accuracy, %", fontsize="small")
    ordered = [label for label in (BASELINE, *names) if label in handles]
    part.legend(
        [handles[label] for label in ordered], ordered, frameon=False, fontsize="small", loc="outside right center"
    )


def _panel(axes: Axes, report: AccuracyReport, names: Sequence[str], heading: str, figures: Figures) -> None:
    if (full := figures(Variant(BASELINE, None))) is not None:
        axes.axhline(100 * full.value, color="black", linewidth=1, linestyle=(0, (1, 1)), label=BASELINE)
    for place, policy in enumerate(names):
        points = [(budget, found) for budget in report.budgets if (found := figures(Variant(policy, budget)))]
        if not points:
            continue
        style = style_of(policy)
        aside = 2 ** (_APART * (place - (len(names) - 1) / 2))
        axes.errorbar(
            [budget * aside for budget, _ in points],
            [100 * found.value for _, found in points],
            yerr=[100 * found.standard_error for _, found in points],
            color=style.colour, marker=style.marker, linestyle=style.line, label=policy,
            markersize=4.5, linewidth=1.2, capsize=2, alpha=0.9,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(report.budgets, [f"{budget:,}" for budget in report.budgets])
    axes.minorticks_off()
    axes.set_ylim(-4, 104)
    axes.tick_params(labelsize="small")
    axes.set_xlabel("token budget", fontsize="small")
    axes.set_title(heading, fontsize="small")
    axes.grid(visible=True, which="major", alpha=0.3)


def _model(report: AccuracyReport) -> str:
    return str(report.settings.get("model", "model"))
