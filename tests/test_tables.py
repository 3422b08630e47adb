from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.tables import _aligned, _wrapped, text_table

HEADERS = ("policy", "stored", "what it does")
ROWS = [("full", "1.5 GiB", "keep every token, read every token"), ("rocketkv", "10.0 MiB", "x" * 200)]


@pytest.fixture
def terminal(monkeypatch):
    def of(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("shutil.get_terminal_size", lambda fallback=(80, 24): os.terminal_size((columns, 24)))

    return of


def test_columns_line_up_below_their_headers():
    assert text_table(HEADERS, ROWS[:1], right=(1,)).splitlines() == [
        "policy   stored  what it does",
        "---------------------------------------------------",
        "full    1.5 GiB  keep every token, read every token",
    ]


def test_a_pipe_has_one_line_per_row():
    lines = text_table(HEADERS, ROWS).splitlines()
    assert len(lines) == 4
    assert "x" * 200 in lines[-1]


@pytest.mark.parametrize("columns", [12, 40, 80])
def test_a_narrow_terminal_shows_everything(terminal, columns):
    terminal(columns)
    lines = text_table(HEADERS, ROWS).splitlines()
    assert max(map(len, lines)) <= columns
    assert "".join(lines).count("x") == 200


def test_markup_in_cells_is_text():
    assert "[bold]8[/bold] :smile:" in text_table(["[red]x"], [["[bold]8[/bold] :smile:"]])


@given(st.lists(st.lists(st.text(st.characters(categories=["L", "N", "P"])), min_size=2, max_size=2), max_size=4))
def test_every_cell_is_printed_whole(rows):
    printed = text_table(("a", "b"), rows)
    assert all(cell in printed for row in rows for cell in row)
    assert "\x1b" not in printed


@given(st.lists(st.lists(st.text(), min_size=2, max_size=2), max_size=4), st.text())
def test_a_terminal_finds_nothing_to_obey_in_a_cell(rows, header):
    printed = text_table((header, "b"), rows)
    assert all(line.isprintable() for line in printed.split("\n"))
    assert len(printed.split("\n")) == 2 + len(rows)


@st.composite
def plain_tables(draw) -> list[list[str]]:
    columns = draw(st.integers(1, 5))
    cell = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12).map(str.strip)
    row = st.lists(cell, min_size=columns, max_size=columns)
    headers = st.lists(st.text("abcN", min_size=1, max_size=9), min_size=columns, max_size=columns)
    return [draw(headers), *draw(st.lists(row, max_size=6))]


@given(cells=plain_tables(), right=st.sets(st.integers(0, 4)))
def test_a_table_without_wrapping_is_what_rich_draws(cells: list[list[str]], right: set[int]) -> None:
    assert _aligned(cells, right, 10_000) == _wrapped(cells, right, 10_000, even=False)


def test_tables_that_wrap_or_hold_wide_characters_are_left_to_rich():
    assert _aligned([["a", "b"], ["x" * 30, "y"]], (), 20) is None
    assert _aligned([["a"], ["漢字"]], (), 80) is None
    assert _aligned([["a", ""], ["x", ""]], (), 80) is None
    assert text_table(["a", "b"], [["x"]]).splitlines()[2] == "x", "a row may lack its last cells"
    assert _aligned([["a"], ["two\nlines"]], (), 80) is None
