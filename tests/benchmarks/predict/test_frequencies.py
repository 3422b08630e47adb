"""Counts of source lines become runs of blocks: small kernels, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.predict.executions import Piece
from benchmarks.predict.frequencies import Counts, Frequencies, Places
from benchmarks.predict.sass import Frame, Instruction, SassBlock, SassKernel, SassLoop

SOURCE = """\
void kernel() {
    begin();
#pragma unroll 4
    for (int i = first; i < n; ++i) {
        add(i);
        if (odd(i)) {
            more(i);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        keep(j);
    }
    end();
}
"""
FILE = "kernel.cuh"
WARPS = 8
ROUNDS = 10
"""Of the first loop, by each warp."""


def _line(number: int) -> tuple[Frame, ...]:
    return ((FILE, number),)


PIECES = [
    Piece(_line(2), WARPS, 1),
    Piece(_line(4), WARPS * (ROUNDS + 1), ROUNDS + 1),
    Piece(_line(5), WARPS * ROUNDS, ROUNDS),
    Piece(_line(7), WARPS * ROUNDS / 2, ROUNDS / 2),
    Piece(_line(12), WARPS * 8 / 4, 8),  # two of the eight warps
    Piece(_line(14), WARPS, 1),
]


def _block(following: list[int], *lines: int) -> SassBlock:
    return SassBlock("", [Instruction(0, "FADD", "R0, R0, R0", "", _line(line)) for line in lines], following)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / FILE).write_text(SOURCE)
    return Places(tmp_path)


@pytest.fixture
def kernel() -> SassKernel:
    """The first loop four rounds at a time and then one by one, with a branch; the second taken apart."""
    blocks = [
        _block([1], 2, 2),
        _block([1, 2], *[5] * 8, 4, 4),
        _block([3, 4], 5, 5),
        _block([4], 7),
        _block([2, 5], 4),
        _block([6], *[12] * 8),
        _block([], 14),
    ]
    loops = [SassLoop(2, frozenset([4]), frozenset([2, 3, 4])), SassLoop(1, frozenset([1]), frozenset([1]))]
    return SassKernel("kernel", blocks, loops)


def test_runs_of_all_warps(places: Places, kernel: SassKernel) -> None:
    found = Frequencies(kernel, Counts(places, PIECES, WARPS, "warps"))
    assert [found.unrolled(loop) for loop in kernel.loops] == [1, 4]
    # 10 rounds: two of four and two of one; the branch in half of them; a quarter of the warps run the second loop.
    assert found.runs == pytest.approx([8, 16, 16, 8, 16, 2, 8])
    assert not found.unmatched


def test_runs_of_the_longest_warp(places: Places, kernel: SassKernel) -> None:
    found = Frequencies(kernel, Counts(places, PIECES, 1, "longest"))
    assert found.runs == pytest.approx([1, 2, 2, 1, 2, 1, 1])


def test_a_loop_without_a_source_is_said(places: Places) -> None:
    elsewhere = SassBlock("", [Instruction(0, "FADD", "R0, R0, R0", "", (("cuda_math.h", 7),))], [0, 1])
    kernel = SassKernel("k", [elsewhere, _block([], 14)], [SassLoop(0, frozenset([0]), frozenset([0]))])
    found = Frequencies(kernel, Counts(places, PIECES, WARPS, "warps"))
    assert found.runs == [WARPS, WARPS]
    assert found.unmatched == ["cuda_math.h:7"]


def test_what_the_host_does_not_inline_is_found_by_its_own_lines(places: Places) -> None:
    counts = Counts(places, PIECES, WARPS, "warps")
    assert counts.at(((FILE, 5), ("caller.cuh", 30))) == WARPS * ROUNDS
    assert counts.at((("cuda_bf16.hpp", 1), (FILE, 7))) == WARPS * ROUNDS / 2
    assert counts.at((("cuda_bf16.hpp", 1),)) is None


def test_one_count_alone_does_not_outvote_two(places: Places) -> None:
    """A piece whose lines do not say all calls around it may be of a loop further in."""
    pieces = [*PIECES, Piece(_line(6), WARPS * ROUNDS, ROUNDS), Piece((("kernel.cuh", 8),), 1000, 1000)]
    ((loop, calls),) = places.around(_line(5))
    assert Counts(places, pieces, WARPS, "warps").rounds((loop, calls)) == WARPS * ROUNDS
