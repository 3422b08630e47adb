"""Render a profile: a table as CSV, and latency per token against context as PNG."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvc_trt.machine import place
from kvc_trt.pages.chart import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = {"engine": (COLOURS[0], "o"), "dense": (COLOURS[1], "s")}
"""Colour and marker of each side, in every picture."""


def csv_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return one line per row of a result; fields that were not measured are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def png_bytes(result: Mapping[str, Any]) -> bytes:
    """Return a figure with one panel per batch size and logarithmic axes; error bars reach from the median to p90."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = result["request_info"]["batch_sizes"]
    figure = Figure(figsize=(max(6.8, 1.2 + 4.4 * len(batches)), 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for panel, batch in zip(panels, batches, strict=True):
        _panel(panel, [row for row in result["rows"] if row["batch_size"] == batch], batch)
    panels[0].set_ylabel("milliseconds per token (median; bar: p90)")
    figure.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, fontsize="small", ncols=4, loc="outside lower center"
    )
    engine, machine = result["engine"], result["machine"]
    policy = engine["policy"]
    figure.suptitle(
        f"{engine['model']}, {policy['policy']}, token budget {policy['token_budget']:,}, {engine['weights']}"
        f"\n{place(machine)}, caches filled synthetically",
        fontsize="medium",
    )
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _panel(panel: Axes, rows: Sequence[Mapping[str, Any]], batch: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for side, (color, marker) in STYLE.items():
        mine = [row for row in rows if row["side"] == side]
        if not mine:
            continue
        contexts = [row["context"] for row in mine]
        medians = [row["median_itl_ms"] for row in mine]
        upward = [row["p90_itl_ms"] - row["median_itl_ms"] for row in mine]
        bars = [[0.0] * len(mine), upward]
        panel.errorbar(contexts, medians, yerr=bars, capsize=3, label=side, color=color, marker=marker)
        floors = [row["floor_ms"] for row in mine]
        panel.plot(contexts, floors, "--", color=color, linewidth=1, label=f"floor of {side} (modelled)")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted({row["context"] for row in rows})
    panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("prompt tokens")
    panel.set_title(f"batch {batch}", fontsize="medium")
    panel.grid(visible=True, which="major", alpha=0.3)
