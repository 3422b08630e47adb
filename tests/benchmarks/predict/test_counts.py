"""Pieces that the emulation counted are asked by place: small sources, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.predict.counts import Counts, RowSlots
from benchmarks.predict.executions import Piece
from benchmarks.predict.sass import Frame

SOURCE = """\
int sum(int n) {
    int all = 0;
    for (int i = 1; i < n; i *= 2) {
        all += get(i);
    }
    return all;
}
void kernel(int n) {
    while (true) {
        attend(n);
        if (last(n)) {
            break;
        }
        synchronize();
        copy(n);
    }
    for (int j = 0; j < n; ++j) {
        look(j);
        if (none(j)) continue;
        sum(32);
        more(j);
    }
    for (int k = first; k < n; ++k) {
        for (int l = 0; l < 8; ++l) {
            keep(l);
        }
    }
}
"""
FILE = "kernel.cuh"


def _line(number: int, *calls: int) -> tuple[Frame, ...]:
    return tuple((FILE, line) for line in (number, *calls))


@pytest.fixture
def places(tmp_path: Path) -> RowSlots:
    (tmp_path / FILE).write_text(SOURCE)
    return RowSlots(tmp_path)


def _counts(places: RowSlots, *pieces: tuple[tuple[Frame, ...], float]) -> Counts:
    return Counts(places, [Piece(frames, count, count) for frames, count in pieces], 1, "warps")


def test_functions_not_inlined_on_the_host_are_found_by_line(places: RowSlots) -> None:
    counts = _counts(places, (_line(10), 80), (_line(15), 40))
    assert counts.at(((FILE, 10), ("caller.cuh", 30))) == 80
    assert counts.at((("cuda_bf16.hpp", 1), (FILE, 15))) == 40
    assert counts.at((("cuda_bf16.hpp", 1),)) is None


def test_a_single_large_count_does_not_outvote_two_equal_ones(places: RowSlots) -> None:
    """A piece whose lines do not say all calls around it may be of a loop further in."""
    counts = _counts(places, (_line(18), 80), (_line(19), 80), (_line(21), 1000))
    (loop,) = places.around(_line(18))
    assert counts.rounds(loop) == 80


def test_the_test_of_a_loop_outvotes_what_two_pieces_of_a_branch_say(places: RowSlots) -> None:
    counts = _counts(places, (_line(17), 80), (_line(18), 80), (_line(20), 10), (_line(21), 10))
    (loop,) = places.around(_line(18))
    assert counts.rounds(loop) == 80


def test_lines_after_an_early_exit_are_not_counted_as_its_test(places: RowSlots) -> None:
    """The test and what follows it are two pieces of one line; the next line says which is which."""
    counts = _counts(places, (_line(10), 8), (_line(11), 8), (_line(11), 3), (_line(15), 3))
    assert counts.at(_line(11)) == 8
    assert counts.at(_line(14)) == 3


def test_rounds_of_a_loop_in_a_call_are_not_those_of_the_call(places: RowSlots) -> None:
    counts = _counts(places, (_line(18), 80), (_line(2, 20), 10), (_line(4, 20), 50), (_line(6, 20), 10))
    assert counts.at(_line(20)) == 10


def test_a_loop_in_a_branch_is_entered_as_often_as_the_lines_beside_it(places: RowSlots) -> None:
    """Ten of 80 rounds call the function, whose loop has five rounds. Calls further out may be unknown."""
    counts = _counts(places, (_line(18), 80), (_line(19), 80), (_line(4, 20), 50), (_line(6, 20), 10))
    outer, inner = places.around(_line(4, 20, 99))
    assert counts.entered(inner, outer) == pytest.approx(10 / 80)


def test_a_body_that_is_a_loop_is_counted_by_it_with_and_without_the_calls(places: RowSlots) -> None:
    counts = _counts(places, (_line(25), 640))
    for calls in ((), (99,)):
        outer, _ = places.around(_line(25, *calls))
        assert counts.rounds(outer) == 80


def test_lanes_of_a_warp_are_counted_for_what_it_does_lane_by_lane(places: RowSlots) -> None:
    pieces = [Piece(_line(10), warps=8, longest=1, lanes=61), Piece(_line(15), warps=4, longest=1, lanes=4)]
    in_all, in_longest = (Counts(places, pieces, 8, of) for of in ("warps", "longest"))
    assert in_all.lanes(_line(10)) == 61 / 8
    assert in_longest.lanes(_line(10)) == 8
    assert in_all.lanes(_line(15)) == 1
    assert in_all.lanes((("elsewhere.cuh", 1),)) == 1
