"""Plots of the page as SVG text: lines over linear axes that begin at zero, and horizontal bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from kvc_trt.pages.chart import COLOURS

_WIDTH, _LEFT, _RIGHT, _LINE = 640, 64, 20, 22
_PLOT = 240
_INK, _SOFT, _GRID = "#1b1f24", "#57606a", "#e4e8ec"


def lines(series: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str, label: str) -> str:
    """Return lines of (x, y), with their names below."""
    most_x = max(x for points in series.values() for x, _ in points) or 1.0
    most_y = max(y for points in series.values() for _, y in points) or 1.0
    x_step, y_step = _round_step(most_x), _round_step(most_y)
    top_y = y_step * math.ceil(most_y / y_step)
    right, bottom = _WIDTH - _RIGHT, _LINE + _PLOT

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (right - _LEFT) * x / most_x, bottom - _PLOT * y / top_y

    body = [_text(_LEFT, 14, y_name, "start", _INK)]
    for count in range(round(top_y / y_step) + 1):
        _, at = place(0, count * y_step)
        body.append(f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="{_GRID}"/>')
        body.append(_text(_LEFT - 8, at + 4, f"{count * y_step:,g}", "end", _SOFT))
    for count in range(math.floor(most_x / x_step) + 1):
        at, _ = place(count * x_step, 0)
        body.append(_text(at, bottom + 17, f"{count * x_step:,g}", "middle", _SOFT))
    body.append(_text((_LEFT + right) / 2, bottom + 36, x_name, "middle", _INK))
    below = bottom + 44
    for (name, points), stroke in zip(series.items(), _strokes(), strict=False):
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in points)
        body.append(f'<path d="M{path}" fill="none" {stroke} stroke-width="2"/>')
        below += _LINE
        body.append(f'<path d="M{_LEFT} {below - 5}h24" {stroke} stroke-width="3"/>')
        body.append(_text(_LEFT + 32, below, name, "start", _INK))
    return _svg(body, below + 12, label)


def bars(values: Mapping[str, float], unit: str, label: str) -> str:
    """Return one horizontal bar per value, with its number at its end."""
    names = 150
    most = max(values.values(), default=0.0) or 1.0
    body = [_text(names, 14, unit, "start", _INK)]
    for place, (name, value) in enumerate(values.items()):
        at = _LINE * (place + 1) + 4
        length = (_WIDTH - names - 90) * value / most
        body.append(_text(names - 8, at + 13, name, "end", _INK))
        body.append(f'<rect x="{names}" y="{at}" width="{length:.1f}" height="16" fill="{COLOURS[0]}"/>')
        body.append(_text(names + length + 6, at + 13, f"{value:,.1f}", "start", _INK))
    return _svg(body, _LINE * (len(values) + 1) + 10, label)


def _strokes() -> Iterator[str]:
    """Yield colours, and once they are used up, the same ones dashed."""
    yield from (f'stroke="{colour}"' for colour in COLOURS)
    yield from (f'stroke="{colour}" stroke-dasharray="7 4"' for colour in COLOURS)


def _round_step(most: float) -> float:
    """Return a round step that makes three to seven of the axis."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(step for step in (power / 5, power / 2, power, 2 * power) if most / step <= 7)


def _text(x: float, y: float, text: str, anchor: str, colour: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _svg(body: Sequence[str], height: float, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="13">'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>{"".join(body)}</svg>\n'
    )
