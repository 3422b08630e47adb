"""The plots of docs/results/accuracy-smollm2.md: the share answered against the bytes stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Comparison, Group, methods
from benchmarks.accuracy.smollm2.stages import CLAIMED, OTHERS
from kvc_trt.accuracy.pages.figures import Style, new_figure, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 1 << 20
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
"""The palette of Okabe and Ito, whose colours differ under every kind of colour vision."""
_MARKERS = "os^DvPX<>h"
_SAME = {"snapkv": "snapkv-gqa", "adakv-snapkv": "snapkv"}
"""Presses, each with the policy that is most like it and whose colour it shares."""
_NO_POLICY = Style("#009E73", "h", "-.")
"""The style of a press that is no policy, in a colour that no other press has."""


def against_bytes(found: Comparison, group: Group) -> bytes:
    """Our policies and kvpress's presses side by side, at the bytes that one sequence stores."""
    sides = [side for side in (OURS, KVPRESS) if found.of(side, group)]
    sizes = [cell.stored / _MIB for side in sides for cell in found.of(side, group)]
    figure = new_figure(5.2 * len(sides), 5.6)
    row = figure.subplots(1, len(sides), sharey=True, squeeze=False)[0]
    for axes, side in zip(row, sides, strict=True):
        _panel(axes, found, side, group)
        axes.set_xlim(0.9 * min(sizes), 1.1 * max(sizes))
        axes.set_xlabel("MiB of cache for one sequence, answer included")
        axes.legend(frameon=False, fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    row[0].set_ylabel("nats a token above the whole cache" if group.task == "log-summary" else "questions answered, %")
    figure.suptitle(str(group), fontsize="medium")
    return png(figure)


def _style(method: str) -> Style:
    """Return the style of a method's place among our policies; a method with settings has its policy's colour."""
    names = [one for one in (*CLAIMED, *OTHERS) if ":" not in one]
    policy, changed, _ = method.partition(":")
    if policy not in names:
        return _NO_POLICY
    place, count = names.index(policy), len(_COLOURS)
    line = ":" if changed else ("-", "--", "-.")[place // count % 3]
    return Style(_COLOURS[place % count], "*" if changed else _MARKERS[place % len(_MARKERS)], line)


def _panel(axes: Axes, found: Comparison, side: str, group: Group) -> None:
    full, cells = found.full(group, side), found.of(side, group)
    if full is not None:
        level = 0.0 if full.likelihood else 100 * full.mean.value
        axes.axhline(level, color="black", linewidth=1, linestyle=(0, (1, 1)), label="whole cache")
    for method in methods(cells):
        points = sorted((one.stored / _MIB, *_shown(found, one)) for one in cells if one.method == method)
        style = _style(_SAME.get(method, method) if side == KVPRESS else method)
        xs, values, below, above = zip(*points, strict=True)
        axes.errorbar(
            xs, values, yerr=(below, above), color=style.colour, marker=style.marker, linestyle=style.line,
            label=method, markersize=4.5, linewidth=1.2, capsize=2, alpha=0.85,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title({OURS: "kvc-trt's policies", KVPRESS: "kvpress's presses"}[side], fontsize="medium")
    axes.grid(visible=True, which="major", alpha=0.3)
    if full is None or not full.likelihood:
        axes.set_ylim(-4, 104)


def _shown(found: Comparison, cell: Answered) -> tuple[float, float, float]:
    """Return a value, and how far its error reaches below and above it: Wilson's interval, or one standard error."""
    if cell.likelihood:
        lost = found.lost(cell)
        assert lost is not None
        return lost.value, lost.standard_error, lost.standard_error
    (low, high), value = cell.interval, cell.mean.value
    return 100 * value, 100 * max(0.0, value - low), 100 * max(0.0, high - value)
