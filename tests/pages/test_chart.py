"""Scales and charts: positions, labels, one mark per point, text escaped."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from kvc_trt.pages.chart import MARKERS, Chart, Series
from kvc_trt.pages.scale import Scale

SVG = "{http://www.w3.org/2000/svg}"


def test_a_scale_is_logarithmic_and_keeps_to_its_ends():
    scale = Scale(1, 100, 0, 200)
    assert [scale(value) for value in (1, 10, 100)] == pytest.approx([0, 100, 200])
    assert scale(1000) == 200
    assert scale(0.001) == 0


def test_a_scale_reaches_beyond_its_values_and_needs_a_positive_one():
    scale = Scale.around([0, 4, 8], 300, 10, margin=2)
    assert (scale.low, scale.high) == (2, 16)
    assert scale(2) == 300
    with pytest.raises(ValueError, match="positive"):
        Scale.around([0, -1], 0, 1)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.5, 2000, [1, 10, 100, 1000]),
        (3, 120, [5, 10, 20, 50, 100]),
        (4, 9, [4, 5, 6, 7, 8, 9]),
        (1e-3, 1e9, [1e-3, 1e-1, 1e1, 1e3, 1e5, 1e7, 1e9]),
    ],
)
def test_ticks_are_round_and_few(low, high, expected):
    assert Scale(low, high, 0, 1).ticks() == pytest.approx(expected)


def test_every_point_has_a_mark_and_a_title_and_text_is_escaped():
    series = [
        Series(f"<{marker}>", [(1, 2), (10, 20)], "#123456", marker, titles=["first", "a & b"]) for marker in MARKERS
    ]
    text = Chart(series, "x < y", "milliseconds", y_values=[200], label="label").svg()
    tree = ElementTree.fromstring(text)
    assert len(tree.findall(f"{SVG}g")) == 2 * len(MARKERS)
    assert [title.text for title in tree.iter(f"{SVG}title")] == ["first", "a & b"] * len(MARKERS)
    assert "x < y" in [node.text for node in tree.iter(f"{SVG}text")]
    assert "100" in [node.text for node in tree.iter(f"{SVG}text")]


def test_lines_and_error_bars_are_drawn_where_they_are_asked_for():
    points = [(1.0, 2.0), (2.0, 3.0)]
    dashed = Chart([Series("a", points, "#111111", None, "dashed")], "x", "y").svg()
    assert "stroke-dasharray" in dashed
    assert "<g>" not in dashed
    bars = Chart([Series("a", points, "#111111", "o", None, upward=[4, 5])], "x", "y").svg()
    assert bars.count("m-4 0h8") == 2
    assert bars.count('stroke-width="2"') == 0
