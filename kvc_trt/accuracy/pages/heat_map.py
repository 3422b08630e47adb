"""A heat map of the needles that are found, by length and depth, with a panel per policy and budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.pages.figures import new_figure, png
from kvc_trt.accuracy.pages.report import AccuracyReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

Grid = NDArray[np.float64]
_BINS = 10
_SAMPLES_PER_BIN = 5
_COLOURS = "cividis"
"""Perceptually even, and read alike by every kind of colour vision."""


def heat_map(report: AccuracyReport, task: str, mode: str) -> bytes | None:
    """Rows of panels are policies, columns token budgets. PNG; None for a task whose samples have no single depth."""
    grids = {policy: _grids(report, task, mode, policy) for policy in report.policies}
    rows = [policy for policy, found in grids.items() if any(grid is not None for grid in found)]
    if not rows:
        return None
    budgets = report.budgets
    figure = new_figure(1.5 * len(budgets) + 2.6, 0.62 * len(rows) + 1.3)
    panels = figure.subplots(len(rows), len(budgets), sharex=True, sharey=True, squeeze=False)
    image = None
    for line, policy in zip(panels, rows, strict=True):
        for axes, grid in zip(line, grids[policy], strict=True):
            image = _panel(axes, report, grid) or image
        line[0].set_ylabel(policy, fontsize="x-small", rotation=0, ha="right", va="center")
    for axes, budget in zip(panels[0], budgets, strict=True):
        axes.set_title(f"token budget {budget:,}", fontsize="x-small")
    for axes in panels[-1]:
        axes.set_xlabel("tokens", fontsize="x-small")
    if image is not None:
        bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.8, aspect=40, pad=0.01)
        bar.set_label("accuracy, %; from top to bottom: depth 0 to 100 %; grey: not applicable", fontsize="x-small")
        bar.ax.tick_params(labelsize="x-small")
    figure.suptitle(f"{report.settings.get('model', 'model')}: {task}, {mode}", fontsize="small")
    return png(figure)


def _grids(report: AccuracyReport, task: str, mode: str, policy: str) -> list[Grid | None]:
    """Accuracy [depth bins, lengths] at each budget, NaN where nothing was asked; None where no length applies."""
    grids: list[Grid | None] = []
    for budget in report.budgets:
        variant = Variant.of(policy, budget)
        cells = [report.cell(report.group(task, mode, length), variant) for length in report.lengths]
        asked = any(cell is not None and cell.depths for cell in cells)
        grids.append(np.stack([by_depth(cell, depth_bins(cells)) for cell in cells], axis=1) if asked else None)
    return grids


def depth_bins(cells: Sequence[Cell | None]) -> int:
    """Return the number of bins of depths such that each has a few samples."""
    samples = max(cell.samples for cell in cells if cell is not None)
    return max(2, min(_BINS, samples // _SAMPLES_PER_BIN))


def by_depth(cell: Cell | None, bins: int) -> Grid:
    """Mean score per depth bin of one cell."""
    column = np.full(bins, np.nan)
    if cell is None or not cell.depths:
        return column
    where = np.minimum((np.array(cell.depths) * bins).astype(int), bins - 1)
    scores = np.array(cell.scores)
    for index in np.unique(where):
        column[index] = scores[where == index].mean()
    return column


def _panel(axes: Axes, report: AccuracyReport, grid: Grid | None) -> AxesImage | None:
    """Draw one panel; grey where nothing applies."""
    axes.set_facecolor("#CCCCCC")
    axes.set_xticks(range(len(report.lengths)), [f"{length:,}" for length in report.lengths])
    axes.tick_params(labelsize="xx-small", left=False, labelleft=False)
    if grid is None:
        return None
    return axes.imshow(100 * grid, aspect="auto", cmap=_COLOURS, vmin=0, vmax=100, interpolation="nearest")
