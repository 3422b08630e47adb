"""A run as one HTML file: the recommendation, quality over memory and over time, and a table of all candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvc_trt.pages.chart import COLOURS, Chart, Series
from kvc_trt.pages.document import render
from kvc_trt.profile.accelerators import accelerator
from kvc_trt.sizes import readable_size

if TYPE_CHECKING:
    from kvc_trt.tuning.result import Line, Tuned

_KINDS = {
    "chosen": ("chosen", COLOURS[1], "D"),
    "alike": ("not distinguishable from the best", COLOURS[0], "o"),
    "behind": ("asked every prompt, and worse", COLOURS[-1], "s"),
    "unfinished": ("not asked enough yet", "#56B4E9", "^"),
    "dropped": ("dropped after fewer prompts", "#8c959f", "v"),
}
_FRONT = "#009E73"
_NOTHING = 1e-6
"""The least divergence that a logarithmic axis shows, in nats."""


def html_page(tuned: Tuned) -> bytes:
    """Return the page; it loads nothing, and every value is escaped."""
    best = tuned.recommendation
    chosen = None if best is None else tuned.line_of(best.chosen)
    findings = list(tuned.findings())
    shown = {line.place for line in tuned.lines}
    return render(
        "kvc_trt.tuning.pages",
        "tune.html.jinja",
        title=f"Which cache policy for {tuned.model}",
        tuned=tuned,
        verdict=findings[0],
        findings=findings[1:],
        tiles=[] if chosen is None else _tiles(tuned, chosen),
        memory=_figure(tuned, lambda line: line.mebibytes, "MiB of cache per row"),
        time=_figure(tuned, _milliseconds, _time_axis(tuned)),
        key=[(name, colour) for place, (name, colour, _) in _KINDS.items() if place in shown],
        front=_FRONT,
        colours={place: colour for place, (_, colour, _) in _KINDS.items()},
        quality="right answers" if tuned.labelled else "divergence from the whole cache",
        size=readable_size,
        settings=[(name.replace("_", " "), value) for name, value in tuned.settings.items() if value is not None],
        refused=_refused(tuned),
    )


def _tiles(tuned: Tuned, line: Line) -> list[tuple[str, str]]:
    """Return the figures of the choice to read first."""
    best, rows = tuned.recommendation, tuned.asked.rows
    assert best is not None
    assert line.quality is not None
    assert best.lost is not None
    whole = sum(tuned.whole) / len(tuned.whole)
    found = [
        (readable_size(line.candidate.row_bytes),
         f"of cache a row; {readable_size(rows * line.candidate.row_bytes)} for {rows} rows, and "
         f"{readable_size(tuned.asked.memory)} are given"),
    ]  # fmt: skip
    if tuned.labelled:
        found += [
            (f"{100 * line.quality:.1f} %",
             f"right answers to {tuned.prompts} prompts; the whole cache {100 * whole:.1f} %"),
            (f"{100 * best.lost[0]:.1f} points", "lost against the whole cache, 95 % interval "
             f"{100 * best.lost[1]:.1f} to {100 * best.lost[2]:.1f}"),
        ]  # fmt: skip
    else:
        interval = f"{best.lost[1]:.4f} to {best.lost[2]:.4f}"
        found.append((f"{-line.quality:.4f}", f"nats per token from the whole cache, 95 % interval {interval}"))
        if line.equal is not None:
            found.append((f"{100 * line.equal:.1f} %", "of the most likely tokens are the whole cache's"))
    if line.step_seconds is not None:
        assert tuned.times is not None
        found.append((f"{1e3 * line.step_seconds:.3g} ms", f"a step; {tuned.times.how}"))
    return found


def _milliseconds(line: Line) -> float | None:
    return None if line.step_seconds is None else 1e3 * line.step_seconds


def _time_axis(tuned: Tuned) -> str:
    if tuned.times is None:
        return ""
    rows = "one row" if tuned.times.rows == 1 else f"{tuned.times.rows} rows"
    gpu = tuned.asked.gpu
    return f"ms for a step of {rows}, {'measured here' if gpu is None else f'floor of {accelerator(gpu).name}'}"


def _figure(tuned: Tuned, cost: Callable[[Line], float | None], axis: str) -> str:
    """Draw quality over a cost; nothing where no candidate has one. The dotted line is the whole cache's quality."""
    points = [(line, across) for line in tuned.lines if line.quality is not None and (across := cost(line)) is not None]
    if not points:
        return ""
    series = []
    if tuned.labelled and tuned.prompts:
        whole = 100 * sum(tuned.whole) / len(tuned.whole)
        ends = [min(across for _, across in points) / 1.25, max(across for _, across in points) * 1.25]
        series.append(Series("whole cache", [(end, whole) for end in ends], "#1b1f24", marker=None, line="dotted"))
    finalists = sorted(((across, line) for line, across in points if line.finalist), key=lambda one: one[0])
    series.append(Series("front", _steps(tuned, finalists), _FRONT, marker=None, line="dashed"))
    for place, (name, colour, marker) in reversed(_KINDS.items()):
        some = [(line, across) for line, across in points if line.place == place]
        if some:
            series.append(Series(
                name, [(across, _up(tuned, line.quality)) for line, across in some], colour, marker, line=None,
                titles=[_title(tuned, line, across, axis) for line, across in some],
                names=[str(line.number) for line, _ in some],
            ))  # fmt: skip
    name = "right answers, %" if tuned.labelled else "divergence, nats per token (less is better)"
    label = f"{name} over {axis}"
    return Chart(series, axis, name, y_range=_range(points) if tuned.labelled else None, label=label).svg()


def _range(points: Sequence[tuple[Line, float]]) -> tuple[float, float]:
    """The ends of the axis of right answers: up to a little over 100 %."""
    least = min(100 * line.quality for line, _ in points if line.quality is not None)
    return max(-4.0, 20 * ((least - 10) // 20)), 104.0


def _steps(tuned: Tuned, finalists: Sequence[tuple[float, Line]]) -> list[tuple[float, float]]:
    """The Pareto front among the finalists, by rising cost: each is better than all that cost less."""
    found: list[tuple[float, float]] = []
    best = float("-inf")
    for across, line in finalists:
        if line.quality is not None and line.quality > best:
            best = line.quality
            found.append((across, _up(tuned, line.quality)))
    return found


def _up(tuned: Tuned, quality: float | None) -> float:
    assert quality is not None
    return 100 * quality if tuned.labelled else max(-quality, _NOTHING)


def _title(tuned: Tuned, line: Line, across: float, axis: str) -> str:
    assert line.quality is not None
    return f"{line.number}. {line.candidate}: {tuned.quality_text(line.quality)}, n {line.prompts}; {across:.3g} {axis}"


def _refused(tuned: Tuned) -> list[tuple[str, list[str]]]:
    """Methods by the reason why they are not tried."""
    found: dict[str, list[str]] = {}
    for name, reason in tuned.found.refused.items():
        found.setdefault(reason, []).append(name)
    return list(found.items())
