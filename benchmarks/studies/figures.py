"""The plots of studies: lines over layers, stacked bars and heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt.accuracy.pages.figures import new_figure, png
from kvc_trt.pages.chart import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Sequence[float | None]


@dataclass(frozen=True)
class Panel:
    """One panel of lines: a name, and a value for each place on the horizontal axis."""

    title: str
    lines: Mapping[str, Values]
    level: tuple[str, float] | None = None
    """A horizontal line, such as the level of chance."""


@dataclass(frozen=True)
class LineAxes:
    """The axes that all panels of a picture share."""

    x: str
    y: str
    ticks: Sequence[float] | None = None
    """Places on the horizontal axis; 0, 1, ... where none are given."""
    limits: tuple[float, float] = (0.0, 1.0)
    log: bool = False
    """True for a logarithmic vertical axis."""
    nested: bool = False
    """True to draw the first lines wider, so that equal lines do not hide each other."""
    shades: bool = False
    """Colours from dark to light in the order of the lines, for many lines of one kind (layers, windows)."""


def lines(title: str, panels: Sequence[Panel], axes: LineAxes) -> bytes:
    """Panels side by side, each with a legend below. PNG."""
    most = max(len(panel.lines) for panel in panels)
    figure = new_figure(5.0 * len(panels), 4.0 + 0.11 * most)
    figure.suptitle(title, fontsize="medium")
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for one, panel in zip(row, panels, strict=True):
        _draw(one, panel, axes)
    row[0].set_ylabel(axes.y)
    return png(figure)


def _draw(one: Axes, panel: Panel, axes: LineAxes) -> None:
    from matplotlib import colormaps

    for place, (name, values) in enumerate(panel.lines.items()):
        shade = place / max(1, len(panel.lines) - 1)
        colour = colormaps["viridis"](0.95 * shade) if axes.shades else COLOURS[place % len(COLOURS)]
        x = list(axes.ticks or range(len(values)))
        y = [np.nan if value is None else value for value in values]
        width = 1.3 + 0.6 * (len(panel.lines) - 1 - place) if axes.nested else 1.3
        one.plot(x, y, color=colour, label=name, linewidth=width, marker="os^Dv"[place % 5], markersize=width + 2)
    if panel.level is not None:
        one.axhline(panel.level[1], color="black", linestyle=":", linewidth=1, label=panel.level[0])
    if axes.log:
        one.set_yscale("log")
    one.set_ylim(*axes.limits)
    one.set_xlabel(axes.x)
    one.set_title(panel.title, fontsize="small")
    one.grid(visible=True, alpha=0.3)
    columns = 6 if len(panel.lines) > 12 else 2
    size = "xx-small" if columns > 2 else "small"
    one.legend(frameon=False, fontsize=size, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.13))


@dataclass(frozen=True)
class Stack:
    """One panel of bars: a name, and the parts of each bar from left to right."""

    title: str
    bars: Mapping[str, Sequence[float]]


def stacked(title: str, panels: Sequence[Stack], parts: Sequence[str], x: str) -> bytes:
    """Panels side by side, with the bars from top to bottom and one legend of their parts. PNG."""
    figure = new_figure(4.2 * len(panels) + 1.4, 1.3 + 0.34 * max(len(panel.bars) for panel in panels))
    figure.suptitle(title, fontsize="medium")
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for one, panel in zip(row, panels, strict=True):
        for place, values in enumerate(panel.bars.values()):
            left = 0.0
            for part, value in enumerate(values):
                label = parts[part] if place == 0 and panel is panels[0] else None
                one.barh(place, value, left=left, color=COLOURS[part], label=label)
                left += value
        one.set_yticks(range(len(panel.bars)), list(panel.bars))
        one.set_xlabel(x)
        one.set_title(panel.title, fontsize="small")
    row[0].invert_yaxis()
    figure.legend(frameon=False, ncols=len(parts), loc="outside lower center", fontsize="small")
    return png(figure)


@dataclass(frozen=True)
class Map:
    """One heat map: rows from top to bottom."""

    title: str
    values: NDArray[np.float64]
    """[rows, columns]; NaN is drawn in grey."""
    crossed: NDArray[np.bool_] | None = None
    """[rows, columns]; these places get a cross: there is nothing to measure."""


@dataclass(frozen=True)
class MapAxes:
    """The axes that all maps of a picture share."""

    x: str
    y: str
    bar: str
    """The meaning of a colour."""
    x_names: Sequence[str] | None = None
    y_names: Sequence[str] | None = None
    x_step: int = 1
    """Tokens or layers of one column."""
    y_step: int = 1
    limits: tuple[float, float] | None = None


def heat_maps(title: str, maps: Sequence[Map], axes: MapAxes, columns: int = 3) -> bytes:
    """Maps in rows, with one bar of colours: dark is low. PNG."""
    columns = min(columns, len(maps))
    rows = -(-len(maps) // columns)
    figure = new_figure(3.9 * columns + 0.9, 3.1 * rows + 0.6)
    figure.suptitle(title, fontsize="medium")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    finite = np.concatenate([one.values[np.isfinite(one.values)] for one in maps])
    low, high = axes.limits or (float(finite.min()), float(finite.max()))
    places = list(grid.flat)
    for one, each in zip(places, maps, strict=False):
        one.set_facecolor("#CCCCCC")
        extent = (0, each.values.shape[1] * axes.x_step, each.values.shape[0] * axes.y_step, 0)
        image = one.imshow(
            each.values, aspect="auto", cmap="cividis", vmin=low, vmax=high, interpolation="nearest", extent=extent
        )
        for row, column in np.argwhere(each.crossed) if each.crossed is not None else ():
            one.text((column + 0.5) * axes.x_step, (row + 0.5) * axes.y_step, "x", ha="center", va="center")
        one.set_title(each.title, fontsize="small")
        one.tick_params(labelsize="small")
        for names, step, setter in (
            (axes.x_names, axes.x_step, one.set_xticks), (axes.y_names, axes.y_step, one.set_yticks),
        ):  # fmt: skip
            if names is not None:
                setter([step * (place + 0.5) for place in range(len(names))], list(names))
    for one in places[len(maps) :]:
        one.set_visible(False)
    for one in places[max(0, len(maps) - columns) : len(maps)]:
        one.set_xlabel(axes.x, fontsize="small")
        one.tick_params(labelbottom=True)
    for one in grid[:, 0]:
        one.set_ylabel(axes.y, fontsize="small")
    bar = figure.colorbar(image, ax=grid, shrink=0.9)
    bar.set_label(axes.bar, fontsize="small")
    return png(figure)
