"""The figure of docs/results/accuracy-formats.md: the share answered over the bytes of one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.accuracy.formats import answers
from benchmarks.accuracy.formats.methods import METHODS
from benchmarks.accuracy.formats.recorded import OPENVINO, Formats, peers
from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Group
from benchmarks.page import span
from kvc_trt.accuracy.pages.figures import new_figure, png
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.pages.chart import COLOURS
from kvc_trt.policies import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 1 << 20
_MARKERS = dict(zip(CACHE_FORMATS, "os^Dv", strict=True))
_LINES: dict[str, Any] = dict(zip(CACHE_FORMATS, ("-", "--", "-.", (0, (3, 1, 1, 1, 1, 1)), ":"), strict=True))
_COLOURS = dict(zip(METHODS, COLOURS, strict=False))
_PEER = "#8a8f98"
_PEER_MARKERS = {KVPRESS: "x", OPENVINO: "*"}


def over_bytes(found: Formats) -> bytes:
    """Return a PNG: a panel per group of questions, a line per method and format, and the peers' points."""
    groups = found.groups
    figure = new_figure(13.5, 4.4 * -(-(len(groups) + 1) // 3))
    panels = figure.subplots(-(-(len(groups) + 1) // 3), 3, squeeze=False).ravel()
    for axes, group in zip(panels, groups, strict=False):
        _panel(axes, found, group)
    _legend(panels[len(groups)])
    for axes in panels[len(groups) + 1 :]:
        axes.set_axis_off()
    return png(figure)


def _panel(axes: Axes, found: Formats, group: Group) -> None:
    full = found.answered.full(group)
    nats = full is not None and full.likelihood
    for cell in peers(found, group):
        if (y := _height(found, cell)) is not None:
            axes.plot(cell.stored / MIB, y, _PEER_MARKERS[cell.side], color=_PEER, markersize=6, zorder=1)
    for method in METHODS:
        budgets = (None,) if method == BASELINE else answers.BUDGETS
        for form in CACHE_FORMATS:
            cells = [one for budget in budgets if (one := found.cell(group, method, form, budget)) is not None]
            points = [(cell.stored / MIB, y) for cell in cells if (y := _height(found, cell)) is not None]
            if points:
                axes.plot(
                    *zip(*points, strict=True), color=_COLOURS[method], marker=_MARKERS[form], linestyle=_LINES[form],
                    linewidth=1.1, markersize=4.5, alpha=0.85, zorder=2,
                )  # fmt: skip
    counts = sorted(len(cell.scores) for cell in found.answered.of(OURS, group))
    asked = span(str(count) for count in counts) if counts else "0"
    whole = "" if full is None or nats else f"; whole: {100 * full.mean.value:.0f} %"
    axes.set_title(f"{group.short} (n = {asked}{whole})", fontsize="medium")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("MiB of cache for one sequence")
    axes.set_ylabel("nats a token above the whole fp32 cache" if nats else "points beside the whole fp32 cache")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.axhline(0, color="black", linewidth=0.8, zorder=0)


def _height(found: Formats, cell: Answered) -> float | None:
    """Points, or nats, beside the whole fp32 cache on the same questions: caches may have been asked fewer of them."""
    beside = found.beside_whole(cell)
    return None if beside is None else beside.value * (1 if cell.likelihood else 100)


def _legend(axes: Axes) -> None:
    from matplotlib.lines import Line2D

    axes.set_axis_off()
    lines = [Line2D([], [], color=_COLOURS[method], linewidth=2.5, label=method) for method in METHODS]
    lines += [
        Line2D([], [], color="black", marker=_MARKERS[form], linestyle=_LINES[form], linewidth=1.1, label=_name(form))
        for form in CACHE_FORMATS
    ]
    others = {KVPRESS: "kvpress's presses, fp32", OPENVINO: "OpenVINO: its eviction, u8"}
    lines += [
        Line2D([], [], color=_PEER, marker=_PEER_MARKERS[side], linestyle="", markersize=6, label=label)
        for side, label in others.items()
    ]
    axes.legend(handles=lines, frameon=False, loc="center", handlelength=3.6, title="colour: method; line: format")


def _name(form: str) -> str:
    return "auto (fp32)" if form == "auto" else form
