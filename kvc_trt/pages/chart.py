"""Line and point charts as SVG text, without a library: axes, series with markers, names and a tooltip for each point.

A chart is drawn for half a page and grows with it, so that its letters stay legible on a narrow screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TypeAlias

from kvc_trt.pages.scale import LinearScale, Scale

Axis: TypeAlias = "Scale | LinearScale"
WIDTH, HEIGHT = 460, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 14, 46
_LINE = 19
_INK, _SOFT, _GRID = "#1b1f24", "#57606a", "#e4e8ec"
_FONT = 'font-family="system-ui, sans-serif" font-size="13"'
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
"""Okabe and Ito's, distinct for every kind of colour vision; without the yellow, which is pale on white."""
MARKERS = "osD^v"


@dataclass(frozen=True)
class Series:
    """Points that belong together."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    marker: str | None = "o"
    """One of MARKERS; None draws the line alone."""
    line: str | None = "solid"
    """solid, dashed or dotted; None draws the markers alone."""
    upward: Sequence[float] = ()
    """Ends of error bars above the points, if there are any."""
    titles: Sequence[str] = ()
    """The text that a pointer over each point shows."""
    names: Sequence[str] = ()
    """Short texts beside the points, set so that they do not hide each other."""
    downward: Sequence[float] = ()
    """Ends of error bars below the points, if there are any."""


@dataclass(frozen=True)
class Chart:
    """A chart: its series and the names of its axes."""

    series: Sequence[Series]
    x_name: str
    y_name: str
    x_ticks: Sequence[float] = ()
    """Values to label; by default round ones."""
    format_x: Callable[[float], str] = field(default=lambda value: f"{value:,g}")
    format_y: Callable[[float], str] = field(default=lambda value: f"{value:,g}")
    y_values: Sequence[float] = ()
    """Further values that the vertical axis has to reach."""
    y_range: tuple[float, float] | None = None
    """The ends of a linear vertical axis; None: it is logarithmic, around the values."""
    label: str = ""
    """For readers that do not see it."""
    legend: bool = False
    """True if the names of the series stand below, for a picture in a file of its own."""

    def svg(self) -> str:
        """Return the chart as one `svg` element."""
        across = [x for series in self.series for x, _ in series.points]
        upward = [y for series in self.series for y in [*(y for _, y in series.points), *series.upward]]
        x = Scale.around(across, _LEFT, WIDTH - _RIGHT)
        y: Axis
        if self.y_range is None:
            y = Scale.around([*upward, *self.y_values], HEIGHT - _BOTTOM, _TOP)
        else:
            y = LinearScale(*self.y_range, HEIGHT - _BOTTOM, _TOP)
        drawn = (part for series in self.series for part in _drawn(series, x, y))
        body = "".join([*self._axes(x, y), *drawn, *_names(self.series, x, y)])
        height, legend = HEIGHT, ""
        if self.legend:
            legend = "".join(_legend(self.series))
            height += _LINE * len(self.series)
        return (
            f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(self.label or self.y_name)}" {_FONT}>'
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>{body}{legend}</svg>'
        )

    def _axes(self, x: Axis, y: Axis) -> Iterator[str]:
        bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        for value in self.x_ticks or x.ticks():
            at = x(value)
            yield f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="{_GRID}"/>'
            yield _text(at, bottom + 17, self.format_x(value), "middle", _SOFT)
        for value in y.ticks():
            at = y(value)
            yield f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="{_GRID}"/>'
            yield _text(_LEFT - 7, at + 4, self.format_y(value), "end", _SOFT)
        yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="{_SOFT}"/>'
        yield _text((_LEFT + right) / 2, HEIGHT - 8, self.x_name, "middle", _INK)
        middle = (_TOP + bottom) / 2
        yield (
            f'<text x="14" y="{middle:.1f}" text-anchor="middle" fill="{_INK}" '
            f'transform="rotate(-90 14 {middle:.1f})">{escape(self.y_name)}</text>'
        )


def _legend(series: Sequence[Series]) -> Iterator[str]:
    for place, one in enumerate(series):
        at = HEIGHT + _LINE * (place + 0.3)
        yield _marker(one.marker or "s", _LEFT, at - 4, one.colour) + _text(_LEFT + 12, at, one.name, "start", _INK)


def _text(x: float, y: float, text: str, anchor: str, colour: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


_DASHES = {"solid": "", "dashed": ' stroke-dasharray="7 4"', "dotted": ' stroke-dasharray="2 4"'}


def _drawn(series: Series, x: Axis, y: Axis) -> Iterator[str]:
    """Draw the line, the error bars, then the markers with their titles."""
    places = [(x(across), y(up)) for across, up in series.points]
    if series.line is not None and len(places) > 1:
        path = "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
        width = 2 if series.marker else 1.5
        dashes = _DASHES[series.line]
        yield f'<path d="M{path}" fill="none" stroke="{series.colour}" stroke-width="{width}"{dashes}/>'
    for ends in (series.upward, series.downward):
        for (across, up), end in zip(places, ends, strict=False):
            yield f'<path d="M{across:.1f} {up:.1f}V{y(end):.1f}m-4 0h8" fill="none" stroke="{series.colour}"/>'
    if series.marker is not None:
        titles = [*series.titles, *[series.name] * (len(places) - len(series.titles))]
        for (across, up), title in zip(places, titles, strict=True):
            yield f"<g>{_marker(series.marker, across, up, series.colour)}<title>{escape(title)}</title></g>"


_SMALL = 11
"""The size of the letters of points' names; a digit is about 0.6 of it wide."""
_RADIUS = 6
"""Room of a marker."""
_DIRECTIONS = [(math.cos(angle), math.sin(angle)) for angle in (turn * math.pi / 6 for turn in range(-1, 11))]
_DISTANCES = (12, 20, 30, 42)
Box = tuple[float, float, float, float]


def _names(series: Sequence[Series], x: Axis, y: Axis) -> Iterator[str]:
    """Draw the names of points where they hide neither markers nor each other, with a line to the point if it is far.

    A name that finds no place is left out: the tooltip has it.
    """
    points = [(one, x(across), y(up)) for one in series if one.marker for across, up in one.points]
    taken: list[Box] = [(across - _RADIUS, up - _RADIUS, across + _RADIUS, up + _RADIUS) for _, across, up in points]
    for one in reversed(series):  # the last ones are drawn over the others
        for name, (across, up) in zip(one.names, one.points, strict=False):
            at = x(across), y(up)
            box = _free_place(name, at, taken)
            if box is not None:
                taken.append(box)
                left, middle = box[0] + 1, (box[1] + box[3]) / 2
                far = math.hypot((box[0] + box[2]) / 2 - at[0], middle - at[1]) > _DISTANCES[1]
                if far:
                    end = min(max(at[0], box[0]), box[2])
                    line = f"M{at[0]:.1f} {at[1]:.1f}L{end:.1f} {middle:.1f}"
                    yield f'<path d="{line}" stroke="{_SOFT}" stroke-width=".6"/>'
                yield (
                    f'<text x="{left:.1f}" y="{middle + 4:.1f}" font-size="{_SMALL}" fill="{one.colour}" '
                    f'font-weight="600">{escape(name)}</text>'
                )


def _free_place(name: str, at: tuple[float, float], taken: Sequence[Box]) -> Box | None:
    wide, high = 0.6 * _SMALL * len(name) + 2, _SMALL
    for distance in _DISTANCES:
        for across, down in _DIRECTIONS:
            middle = at[0] + across * (distance + wide / 2 - 4), at[1] + down * distance
            box = middle[0] - wide / 2, middle[1] - high / 2, middle[0] + wide / 2, middle[1] + high / 2
            inside = box[0] >= _LEFT and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT - _BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                return box
    return None


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


_POLYGONS = {"s": (4, 45, 5.6), "D": (4, 0, 6.0), "^": (3, -90, 6.0), "v": (3, 90, 6.0)}
"""Corners, angle of the first in degrees, radius."""


def _marker(kind: str, x: float, y: float, colour: str) -> str:
    style = f'fill="{colour}" stroke="white" stroke-width="1"'
    if kind == "o":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.6" {style}/>'
    corners, first, radius = _POLYGONS[kind]
    angles = [math.radians(first + 360 * corner / corners) for corner in range(corners)]
    points = " ".join(f"{x + radius * math.cos(a):.1f},{y + radius * math.sin(a):.1f}" for a in angles)
    return f'<polygon points="{points}" {style}/>'
