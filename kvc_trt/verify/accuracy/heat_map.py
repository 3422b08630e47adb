"""Where in the context a needle is found: lengths x depths, a panel per policy and budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt.verify.accuracy.cell import Cell
from kvc_trt.verify.accuracy.figure import new_figure, png
from kvc_trt.verify.accuracy.grid import FULL, Group, Variant
from kvc_trt.verify.accuracy.report import AccuracyReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

_BINS = 10
_SAMPLES_PER_BIN = 5
_COLOURS = "cividis"
"""Perceptually even, and read alike by every kind of colour vision."""


def heat_map(report: AccuracyReport, task: str, mode: str) -> bytes | None:
    """Rows of panels are token budgets, columns policies. PNG; None for a task whose samples have no single depth."""
    columns = [policy for policy in report.policies if _grid(report, task, mode, policy, None) is not None]
    if not columns or not report.budgets:
        return None
    budgets = report.budgets
    figure = new_figure(1.6 * len(columns) + 1.4, 1.7 * len(budgets) + 1.3)
    panels = figure.subplots(len(budgets), len(columns), sharex=True, sharey=True, squeeze=False)
    image = None
    for row, budget in enumerate(budgets):
        for column, policy in enumerate(columns):
            axes = panels[row, column]
            image = _panel(axes, report, _grid(report, task, mode, policy, budget)) or image
            if row == 0:
                axes.set_title(policy, fontsize="x-small")
            if column == 0:
                axes.set_ylabel(f"budget {budget}\ndepth, %", fontsize="x-small")
            if row == len(budgets) - 1:
                axes.set_xlabel("tokens", fontsize="x-small")
    if image is not None:
        bar = figure.colorbar(image, ax=panels, shrink=0.8, aspect=40)
        bar.set_label("accuracy, %", fontsize="small")
    title = f"{report.settings.get('model', 'model')}: {task}, {mode}; length x depth (grey: not applicable)"
    figure.suptitle(title, fontsize="small")
    return png(figure)


def _grid(report: AccuracyReport, task: str, mode: str, policy: str, budget: int | None) -> NDArray[np.float64] | None:
    """Accuracy [depth bins, lengths], NaN where nothing was asked; None where the policy has no depths at all.

    With `budget` None: of the policy's first budget that applies.
    """
    wanted = report.budgets if budget is None else [budget]
    for one in wanted:
        variant = Variant(policy, None if policy == FULL else one)
        cells = [report.cell(Group(task, mode, length), variant) for length in report.lengths]
        if any(cell is not None and cell.depths for cell in cells):
            return np.stack([_column(cell, _bins(cells)) for cell in cells], axis=1)
    return None


def _bins(cells: Sequence[Cell | None]) -> int:
    """As many depths as leave a few samples for each."""
    samples = max(cell.samples for cell in cells if cell is not None)
    return max(2, min(_BINS, samples // _SAMPLES_PER_BIN))


def _column(cell: Cell | None, bins: int) -> NDArray[np.float64]:
    """Mean score per depth bin of one cell."""
    column = np.full(bins, np.nan)
    if cell is None or not cell.depths:
        return column
    where = np.minimum((np.array(cell.depths) * bins).astype(int), bins - 1)
    scores = np.array(cell.scores)
    for index in np.unique(where):
        column[index] = scores[where == index].mean()
    return column


def _panel(axes: Axes, report: AccuracyReport, grid: NDArray[np.float64] | None) -> AxesImage | None:
    """Draw one panel; grey where nothing applies."""
    axes.set_facecolor("#CCCCCC")
    axes.set_xticks(range(len(report.lengths)), [f"{length:,}" for length in report.lengths], rotation=60)
    axes.tick_params(labelsize="xx-small")
    if grid is None:
        return None
    bins = len(grid)
    axes.set_yticks([0, (bins - 1) / 2, bins - 1], ["0", "50", "100"])
    return axes.imshow(100 * grid, aspect="auto", cmap=_COLOURS, vmin=0, vmax=100, interpolation="nearest")
