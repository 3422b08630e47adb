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


def test_loads_before_a_loop_are_waited_for_once() -> None:
    load = SassBlock("", [Instruction(0, "LDG.E.128", "R4, [R2.64]")], [1])
    use = SassBlock("", [Instruction(16, "FADD", "R1, R1, R4")], [1, 2])
    kernel = SassKernel("k", [load, use, SassBlock("", [])], [SassLoop(1, frozenset([1]), frozenset([1]))])
    before, during, _ = chain.costs(kernel, [1.0, 10.0, 1.0])
    assert before.clocks == pytest.approx(2 + FROM_MEMORY - hardware.ARITHMETIC_LATENCY - 1, abs=3)
    assert during.clocks == pytest.approx(hardware.ARITHMETIC_LATENCY)


FROM_MEMORY = hardware.LOADED_LATENCY * hardware.DEVICE_LATENCY
FROM_L2 = hardware.LOADED_LATENCY * hardware.L2_LATENCY


def test_a_warp_waits_for_what_it_reads() -> None:
    loads = [("LDG.E.128", "R4, [R2.64]"), ("LDG.E", "R1, [R2.64]")]
    (cost,) = chain.costs(_kernel([*loads, ("FADD", "R5, R1, R4"), ("EXIT", "")]), [1.0])
    assert cost.clocks == pytest.approx(FROM_MEMORY + 2), "both loads are under way together"
    assert cost.units == {"memory": 4 + 1}


def test_narrow_loads_are_from_the_second_level_cache() -> None:
    (cost,) = chain.costs(_kernel([("LDG.E", "R1, [R2.64]"), ("FADD", "R5, R1, R3")]), [1.0])
    assert cost.clocks == pytest.approx(FROM_L2 + 1)


def test_copies_are_waited_for_where_the_kernel_says() -> None:
    copies = [("LDGSTS.E.BYPASS.128", "[R1], desc[UR4][R2.64]"), ("FADD", "R5, R6, R7")]
    (free,) = chain.costs(_kernel(copies), [1.0])
    (waiting,) = chain.costs(_kernel([*copies, ("DEPBAR.LE", "SB0, 0x0")]), [1.0])
    assert free.clocks < 10
    assert waiting.clocks == pytest.approx(FROM_MEMORY + 1)
    assert waiting.units["memory"] == 4


def test_bytes_are_waited_for_where_the_kernel_asks() -> None:
    sent = [("STAS.128", "[R20.64], R16"), ("SYNCS.ARRIVE.TRANS64", "RZ, [UR22], R8"), ("FADD", "R5, R6, R7")]
    asked = [("SYNCS.PHASECHK.TRANS64.TRYWAIT", "P0, [R14+URZ], R13"), ("SEL", "R1, R2, R3, P0")]
    (free,) = chain.costs(_kernel(sent), [1.0])
    (waiting,) = chain.costs(_kernel([*sent, *asked]), [1.0])
    assert free.clocks < 10
    assert waiting.clocks == pytest.approx(free.clocks + hardware.BYTES_LATENCY + 2, abs=1)
    assert waiting.units["memory"] == 4


def test_a_fence_of_the_block_waits_for_less_than_one_of_the_device() -> None:
    (own,) = chain.costs(_kernel([("MEMBAR.ALL.CTA", ""), ("FADD", "R5, R6, R7")]), [1.0])
    (of_device,) = chain.costs(_kernel([("MEMBAR.SC.GPU", ""), ("FADD", "R5, R6, R7")]), [1.0])
    assert of_device.clocks - own.clocks == hardware.LATENCY["MEMBAR"] - hardware.BLOCK_FENCE_LATENCY


def test_a_round_of_a_loop_waits_for_the_round_before() -> None:
    chained = _kernel([("MUFU.EX2", "R1, R1")], loop=True)
    (cost,) = chain.costs(chained, [1.0])
    assert cost.clocks == pytest.approx(hardware.LATENCY["MUFU"])


def _work(*pieces: tuple[float, float]) -> Work:
    return Work(0, 0, 0, 0, 0, pieces, ())


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


def test_one_multiprocessor_cannot_use_the_whole_bandwidth() -> None:
    time = kernel_time.time_on(Gpu(H200), _work((0, 0)), Geometry(1, 1), 64_000)
    assert time.memory == pytest.approx(1000 * US)
