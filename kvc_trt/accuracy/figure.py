"""Making a matplotlib figure without a display, and turning it into a file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 130


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches that lays itself out."""
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
