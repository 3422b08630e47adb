"""Counts of source lines become runs of blocks: small kernels, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.predict.counts import Counts, RowSlots
from benchmarks.predict.executions import Piece
from benchmarks.predict.frequencies import Frequencies
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
"""Iterations of the first loop, by each warp."""


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
def places(tmp_path: Path) -> RowSlots:
    (tmp_path / FILE).write_text(SOURCE)
    return RowSlots(tmp_path)


@pytest.fixture
def kernel() -> SassKernel:
    """The first loop four rounds at a time and then one by one, with a branch; the second taken apart, in a branch."""
    blocks = [
        _block([1], 2, 2),
        _block([1, 2], *[5] * 8, 4, 4),
        _block([3, 4], 5, 5),
        _block([4], 7),
        _block([2, 5], 4),
        _block([6, 7]),
        _block([7], *[12] * 8),
        _block([], 14),
    ]
    loops = [SassLoop(2, frozenset([4]), frozenset([2, 3, 4])), SassLoop(1, frozenset([1]), frozenset([1]))]
    return SassKernel("kernel", blocks, loops)


def test_runs_of_all_warps_match_hand_computed_values(places: RowSlots, kernel: SassKernel) -> None:
    found = Frequencies(kernel, Counts(places, PIECES, WARPS, "warps"))
    assert [found.unrolled(loop) for loop in kernel.loops] == [1, 4]
    # 10 rounds: two of four and two of one; the branch in half of them; a quarter of the warps run the second loop.
    assert found.runs == pytest.approx([8, 16, 16, 8, 16, 8, 2, 8])
    assert not found.unmatched


def test_runs_of_the_longest_warp_match_hand_computed_values(places: RowSlots, kernel: SassKernel) -> None:
    found = Frequencies(kernel, Counts(places, PIECES, 1, "longest"))
    assert found.runs == pytest.approx([1, 2, 2, 1, 2, 1, 1, 1])


def test_a_loop_without_a_source_is_reported_as_unmatched(places: RowSlots) -> None:
    elsewhere = SassBlock("", [Instruction(0, "FADD", "R0, R0, R0", "", (("cuda_math.h", 7),))], [0, 1])
    kernel = SassKernel("k", [elsewhere, _block([], 14)], [SassLoop(0, frozenset([0]), frozenset([0]))])
    found = Frequencies(kernel, Counts(places, PIECES, WARPS, "warps"))
    assert found.runs == [WARPS, WARPS]
    assert found.unmatched == ["cuda_math.h:7"]


def _asking(*after: int, line: int = 7) -> SassBlock:
    """An mbarrier is asked for bytes, by line 14; `line` is that of ptx.cuh."""
    frames = (("ptx.cuh", line), *_line(14))
    other = Instruction(0, "YIELD", "", "", frames)
    ask = Instruction(0, "SYNCS.PHASECHK.TRANS64.TRYWAIT", "P0, [R14+URZ], R13", "", frames)
    return SassBlock("", [other, ask, Instruction(16, "BRA", "`(.L_x_1)", "!P0", frames)], list(after))


def test_a_wait_for_bytes_counts_once(places: RowSlots) -> None:
    """The compiler asks once in line, and elsewhere again until the bytes are there; or in one loop alone."""
    peeled = SassKernel(
        "k", [_asking(1, 2), _asking(1, 2, line=9), _block([], 14)], [SassLoop(1, frozenset([1]), frozenset([1]))]
    )
    found = Frequencies(peeled, Counts(places, PIECES, WARPS, "warps"))
    assert found.runs == [WARPS, 0, WARPS]
    assert not found.unmatched
    alone = SassKernel(
        "k", [_block([1], 2), _asking(1, 2), _block([], 14)], [SassLoop(1, frozenset([1]), frozenset([1]))]
    )
    assert Frequencies(alone, Counts(places, PIECES, WARPS, "warps")).runs == [WARPS, WARPS, WARPS]


def test_what_a_warp_does_lane_by_lane_has_as_many_rounds_as_lanes(places: RowSlots) -> None:
    instructions = [
        Instruction(0, "UBLKCP.S.G", "[UR4], [UR6], UR8", "", _line(2)),
        Instruction(16, "BRA.U.ANY", "`(.L_x_1)", "P0", _line(2)),
    ]
    copy = SassBlock("", instructions, [0, 1])
    kernel = SassKernel("k", [copy, _block([], 14)], [SassLoop(0, frozenset([0]), frozenset([0]))])
    pieces = [Piece(_line(2), WARPS, 1, lanes=61), Piece(_line(14), WARPS, 1, lanes=256)]
    assert Frequencies(kernel, Counts(places, pieces, WARPS, "warps")).runs == [61, WARPS]
    assert Frequencies(kernel, Counts(places, pieces, 1.0, "longest")).runs == [8, 1]


def test_one_warp_with_fewer_rounds_leaves_the_others_their_whole_ones(places: RowSlots, kernel: SassKernel) -> None:
    """31 warps do 32 rounds, one does 31: 127 or 128 times four of them, not three times four by each warp."""
    warps, rounds = 32, 32
    pieces = [Piece(_line(2), warps, 1), Piece(_line(5), warps * rounds - 1, rounds), Piece(_line(14), warps, 1)]
    found = Frequencies(kernel, Counts(places, pieces, warps, "warps"))
    assert found.runs[1] == pytest.approx((warps * rounds - 1) / 4)
    assert found.runs[2] == pytest.approx(0)


def test_rounds_that_are_left_over_stand_behind_the_loop(places: RowSlots) -> None:
    """Ten rounds, four at a time: two times in the loop, two of the three copies behind it."""
    blocks = [
        _block([1, 2], 2),
        _block([1, 2], *[5] * 8, 4),
        _block([3, 6]),
        _block([4, 6], 5, 5),
        _block([5, 6], 5, 5),
        _block([6], 5, 5),
        _block([], 14),
    ]
    kernel = SassKernel("kernel", blocks, [SassLoop(1, frozenset([1]), frozenset([1]))])
    found = Frequencies(kernel, Counts(places, PIECES, WARPS, "warps"))
    assert found.runs[1] == pytest.approx(WARPS * 2)
    assert sum(found.runs[3:6]) == pytest.approx(WARPS * 2)


TWO_VERSIONS = """\
void add(int i) {
    plus(i);
}
void kernel(bool even) {
    if (even) {
        add(2);
    } else {
        add(1);
    }
    end();
}
"""


def test_one_of_two_versions_of_a_call_may_never_run(tmp_path: Path) -> None:
    """Both versions begin with the same lines of the caller, which do not decide; their own lines do."""
    (tmp_path / FILE).write_text(TWO_VERSIONS)
    first, second = (FILE, 6), (FILE, 8)
    plus = (FILE, 2)
    pieces = [Piece(_line(5), 8, 1), Piece((plus, first), 0, 0), Piece((plus, second), 8, 1), Piece(_line(10), 8, 1)]
    arms = [
        SassBlock("", [Instruction(0, "MOV", "", "", _line(5)), Instruction(0, "FADD", "", "", (plus, call))], [3])
        for call in (first, second)
    ]
    for arm in arms:
        arm.instructions.insert(0, Instruction(0, "MOV", "", "", _line(5)))
    kernel = SassKernel("kernel", [_block([1, 2], 5), *arms, _block([], 10)])
    found = Frequencies(kernel, Counts(RowSlots(tmp_path), pieces, 8, "warps"))
    assert found.runs == pytest.approx([8, 0, 8, 8])


def test_blocks_on_the_same_ways_run_equally_often(places: RowSlots) -> None:
    """A block of instructions that were moved into it has the runs of those that it is always run with."""
    moved = SassBlock("", [Instruction(0, "FADD", "", "", _line(7)), Instruction(0, "FADD", "", "", _line(12))], [2])
    kernel = SassKernel("kernel", [_block([1], 2), moved, _block([], 14)])
    assert Frequencies(kernel, Counts(places, PIECES, WARPS, "warps")).runs == [WARPS] * 3


def test_a_barrier_of_a_cluster_is_taken_as_a_cluster_does(places: RowSlots) -> None:
    """The compiler adds an arm for launches without clusters, from the same line."""
    arms = [SassBlock("", [Instruction(0, name, "", "", _line(2))], [3]) for name in ("UCGABAR_WAIT", "BAR")]
    kernel = SassKernel("kernel", [_block([1, 2], 2), *arms, _block([], 14)])
    found = Frequencies(kernel, Counts(places, PIECES, WARPS, "warps"))
    assert found.runs == [WARPS, WARPS, 0, WARPS]
