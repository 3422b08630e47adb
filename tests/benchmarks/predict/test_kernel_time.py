"""Times of launches that are small enough to be computed by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from benchmarks.predict import chain, hardware, kernel_time
from benchmarks.predict.hardware import Gpu
from benchmarks.predict.kernel_time import Geometry, Work
from benchmarks.predict.sass import Instruction, SassBlock, SassKernel, SassLoop
from kvc_trt.profile.accelerators import H100, H200

US = 1e6 / hardware.CLOCK


def _kernel(instructions: Iterable[tuple[str, str]], *, loop: bool = False) -> SassKernel:
    block = SassBlock("", [Instruction(0, *one) for one in instructions], [0] if loop else [])
    return SassKernel("k", [block], [SassLoop(0, frozenset([0]), frozenset([0]))] if loop else [])


def _costs(kernel: SassKernel) -> list[chain.BlockCost]:
    """Of a kernel whose every block one warp runs once."""
    once = [1.0] * len(kernel.blocks)
    return chain.costs(kernel, once, once)


def test_loads_before_a_loop_are_waited_for_once() -> None:
    load = SassBlock("", [Instruction(0, "LDG.E.128", "R4, [R2.64]")], [1])
    use = SassBlock("", [Instruction(16, "FADD", "R1, R1, R4")], [1, 2])
    kernel = SassKernel("k", [load, use, SassBlock("", [])], [SassLoop(1, frozenset([1]), frozenset([1]))])
    before, during, _ = chain.costs(kernel, [1.0, 10.0, 1.0], [1.0, 10.0, 1.0])
    assert before.clocks == pytest.approx(2 + FROM_MEMORY - hardware.ARITHMETIC_LATENCY - 1, abs=3)
    assert during.clocks == pytest.approx(hardware.ARITHMETIC_LATENCY)


FROM_MEMORY = hardware.LOADED_LATENCY * hardware.DEVICE_LATENCY
FROM_L2 = hardware.LOADED_LATENCY * hardware.L2_LATENCY


def test_a_warp_waits_for_what_it_reads() -> None:
    loads = [("LDG.E.128", "R4, [R2.64]"), ("LDG.E", "R1, [R2.64]")]
    (cost,) = _costs(_kernel([*loads, ("FADD", "R5, R1, R4"), ("EXIT", "")]))
    assert cost.clocks == pytest.approx(FROM_MEMORY + 2), "both loads are under way together"
    assert cost.units == {"memory": 4 + 1}


def test_narrow_loads_are_from_the_second_level_cache() -> None:
    (cost,) = _costs(_kernel([("LDG.E", "R1, [R2.64]"), ("FADD", "R5, R1, R3")]))
    assert cost.clocks == pytest.approx(FROM_L2 + 1)


COPY = ("LDGSTS.E.BYPASS.128", "[R1], desc[UR4][R2.64]")
GROUP = ("LDGDEPBAR", "")
WORK = ("FADD", "R5, R5, R7")
CHAINED = hardware.ARITHMETIC_LATENCY


def test_copies_are_waited_for_where_the_kernel_says() -> None:
    copies = [COPY, GROUP, WORK]
    (free,) = _costs(_kernel(copies))
    (waiting,) = _costs(_kernel([*copies, ("DEPBAR.LE", "SB0, 0x0")]))
    assert free.clocks < 10
    assert waiting.clocks == pytest.approx(FROM_MEMORY + 1)
    assert waiting.units["memory"] == 4


def test_a_wait_leaves_the_latest_groups_under_way() -> None:
    before = [COPY, GROUP, *[WORK] * 50, COPY, GROUP]
    (one,) = _costs(_kernel([*before, ("DEPBAR.LE", "SB0, 0x1")]))
    (both,) = _costs(_kernel([*before, ("DEPBAR.LE", "SB0, 0x0")]))
    assert one.clocks == pytest.approx(FROM_MEMORY + 1)
    assert both.clocks == pytest.approx(FROM_MEMORY + 50 * CHAINED, abs=10)


COPY_IN_BULK = ("UBLKCP.S.G", "[UR4], [UR6], UR8")
ASKED = ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "P0, [R14+URZ], R13")
ANSWERED = ("SEL", "R1, R2, R3, P0")


def test_copies_in_bulk_are_waited_for_by_their_bytes() -> None:
    (cost,) = _costs(_kernel([COPY_IN_BULK, ASKED, ANSWERED]))
    assert cost.clocks == pytest.approx(FROM_MEMORY + hardware.LATENCY["LDS"] + 2, abs=2)
    assert cost.covered == 0


def test_work_behind_the_latency_of_copies_is_covered_by_their_transfer() -> None:
    work = [WORK] * 400
    (cost,) = _costs(_kernel([COPY, GROUP, *work, ("DEPBAR.LE", "SB0, 0x0")]))
    assert cost.covered == pytest.approx(400 * CHAINED - FROM_MEMORY, abs=10)
    (cost,) = _costs(_kernel([COPY_IN_BULK, *work, ASKED, ANSWERED]))
    assert cost.covered == pytest.approx(400 * CHAINED - FROM_MEMORY, abs=10)


def test_no_time_is_covered_twice() -> None:
    work = [WORK] * 400
    (cost,) = _costs(_kernel([COPY, GROUP, COPY, GROUP, *work, ("DEPBAR.LE", "SB0, 0x1"), ("DEPBAR.LE", "SB0, 0x0")]))
    assert cost.covered == pytest.approx(400 * CHAINED - FROM_MEMORY, abs=10)
    work = [WORK] * 200
    parts = [COPY_IN_BULK, *work, ASKED, ANSWERED, *work, ASKED, ANSWERED]
    (cost,) = _costs(_kernel(parts))
    assert cost.covered == pytest.approx(400 * CHAINED - FROM_MEMORY, abs=80)
    (sent,) = _costs(_kernel([*parts, ("STAS", "[R20.64], R16"), *work, ASKED, ANSWERED]))
    assert sent.covered == cost.covered, "the last wait is for bytes of another block"


def test_a_loop_takes_its_rounds_of_the_time_of_copies() -> None:
    """Copies ahead of a loop of many rounds are there behind it; those of a loop of one round are not."""
    ahead = SassBlock("", [Instruction(0, *COPY), Instruction(16, *GROUP)], [1])
    loop = SassBlock("", [Instruction(32 + 16 * i, *WORK) for i in range(40)], [1, 2])
    wait = SassBlock("", [Instruction(800, "DEPBAR.LE", "SB0, 0x0")])
    kernel = SassKernel("k", [ahead, loop, wait], [SassLoop(1, frozenset([1]), frozenset([1]))])
    for rounds in (1.0, 10.0):
        cost = chain.costs(kernel, [1.0, rounds, 1.0], [1.0, rounds, 1.0])[2]
        assert cost.clocks == pytest.approx(max(FROM_MEMORY - 40 * rounds * CHAINED, 0), abs=10)
        assert cost.covered == pytest.approx(max(40 * rounds * CHAINED - FROM_MEMORY, 0), abs=10)


def test_bytes_are_waited_for_where_the_kernel_asks() -> None:
    sent = [("STAS.128", "[R20.64], R16"), ("SYNCS.ARRIVE.TRANS64", "RZ, [UR22], R8"), ("FADD", "R5, R6, R7")]
    asked = [ASKED, ANSWERED]
    (free,) = _costs(_kernel(sent))
    (waiting,) = _costs(_kernel([*sent, *asked]))
    (there,) = _costs(_kernel([*sent, *[WORK] * 100, *asked]))
    assert free.clocks < 10
    assert waiting.clocks == pytest.approx(hardware.BYTES_LATENCY + 1, abs=1)
    assert there.clocks == pytest.approx(free.clocks + 100 * CHAINED + hardware.LATENCY["LDS"], abs=5)
    assert waiting.units["memory"] == 4


def test_the_barrier_of_a_cluster_is_waited_for_from_the_arrival_on() -> None:
    arrived, waits = ("UCGABAR_ARV", ""), ("UCGABAR_WAIT", "")
    (at_once,) = _costs(_kernel([arrived, waits]))
    (later,) = _costs(_kernel([arrived, *[WORK] * 100, waits]))
    assert at_once.clocks == pytest.approx(hardware.CLUSTER_LATENCY + 1, abs=1)
    assert later.clocks == pytest.approx(100 * CHAINED + hardware.LATENCY["UCGABAR_WAIT"], abs=10)


def test_a_fence_of_the_block_waits_for_less_than_one_of_the_device() -> None:
    (own,) = _costs(_kernel([("MEMBAR.ALL.CTA", ""), ("FADD", "R5, R6, R7")]))
    (of_device,) = _costs(_kernel([("MEMBAR.SC.GPU", ""), ("FADD", "R5, R6, R7")]))
    assert of_device.clocks - own.clocks == hardware.LATENCY["MEMBAR"] - hardware.BLOCK_FENCE_LATENCY


def test_a_round_of_a_loop_waits_for_the_round_before() -> None:
    chained = _kernel([("MUFU.EX2", "R1, R1")], loop=True)
    (cost,) = _costs(chained)
    assert cost.clocks == pytest.approx(hardware.LATENCY["MUFU"])


def _work(*pieces: tuple[float, float], covered: float = 0) -> Work:
    return Work(0, 0, 0, 0, 0, covered, pieces, ())


def test_blocks_that_are_resident_together_go_side_by_side() -> None:
    done = _work((1000, 100), (50, 200))
    assert done.clocks(Geometry(132, 20)) == 1000 + 200
    assert done.clocks(Geometry(132 * 20, 20)) == 20 * 100 + 20 * 200


def test_blocks_in_rounds_overlap() -> None:
    done = _work((1000, 100), (50, 200))
    assert done.clocks(Geometry(132 * 5, 2)) == 3 * 1050, "three rounds of the longest warp"
    assert done.clocks(Geometry(132 * 40, 20)) == 40 * 300


def test_the_time_names_its_bound() -> None:
    lies = Geometry(ctas=132 * 5, resident=2)
    assert (lies.busiest, lies.rounds) == (5, 3)
    time = kernel_time.time_on(Gpu(H100), _work((1000, 0)), lies, 0)
    assert time.execution == pytest.approx(3000 * US)
    assert (time.total, time.bound_by) == (time.execution, "latency")


def test_bytes_are_added_to_what_is_resident_at_once_and_else_overlap() -> None:
    moved = 1e9
    for gpu in (Gpu(H100), Gpu(H200)):
        memory = 1e6 * moved / (0.92 * gpu.accelerator.bandwidth)
        once = kernel_time.time_on(gpu, _work((1000, 0)), Geometry(132, 1), moved)
        rounds = kernel_time.time_on(gpu, _work((1000, 0)), Geometry(133, 1), moved)
        assert once.total == pytest.approx(1000 * US + memory)
        assert rounds.total == pytest.approx(memory)
        assert rounds.bound_by == "memory"


def test_what_a_transfer_covers_is_counted_once() -> None:
    moved = 1e7
    memory = 1e6 * moved / (0.92 * H100.bandwidth)
    for covered, counted in ((500, 500 * US), (1e9, memory)):
        time = kernel_time.time_on(Gpu(H100), _work((1000, 0), covered=covered), Geometry(132, 1), moved)
        assert time.total == pytest.approx(1000 * US + memory - counted)
        assert (time.execution, time.memory) == (pytest.approx(1000 * US), pytest.approx(memory))


def test_one_multiprocessor_cannot_use_the_whole_bandwidth() -> None:
    time = kernel_time.time_on(Gpu(H200), _work((0, 0)), Geometry(1, 1), 64_000)
    assert time.memory == pytest.approx(1000 * US)
