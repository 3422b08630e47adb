"""The emulation runs blocks as CUDA does: orders, barriers, warp operations, shared memory, and every mistake found."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.kernels.occupancy import MULTIPROCESSORS
from kvc_trt.kernels.c_library import ARCHITECTURES
from tests.plugins_cuda import toys
from tests.plugins_cuda.toys import SCHEDULES, Toys, aligned

U32 = np.uint32


@pytest.fixture(scope="session")
def toy_library() -> Toys:
    return toys.toys()


@pytest.fixture(params=SCHEDULES)
def scheduled(request: pytest.FixtureRequest, toy_library: Toys) -> Iterator[Toys]:
    """The toys in each schedule."""
    toy_library.set_schedule(request.param, seed=11)
    yield toy_library
    toy_library.set_schedule("forward")


@pytest.mark.slow
def test_reductions_give_every_thread_the_same_bits_in_every_schedule(scheduled):
    blocks, threads = 64, 96
    x = np.random.default_rng(0).standard_normal((blocks, threads), dtype=np.float32)
    x[3, 40] = np.nan
    sums, maxima = np.zeros_like(x), np.zeros_like(x)
    before, total = np.zeros(x.shape, np.int32), np.zeros(x.shape, np.int32)
    assert scheduled.run("run_reductions", blocks, x, sums, maxima, before, total) == ""

    warps = x.reshape(blocks, 3, 32)
    for step in (16, 8, 4, 2, 1):  # the butterfly's tree
        warps = (warps + warps[..., np.arange(32) ^ step]).astype(np.float32)
    expected = (warps[:, 0, 0] + warps[:, 1, 0]) + warps[:, 2, 0]
    np.testing.assert_array_equal(sums, np.repeat(expected[:, None], threads, 1))
    largest = x.reshape(blocks, 3, 32).max(-1)
    np.testing.assert_array_equal(maxima, np.repeat(largest, 32, 1))
    squares = (np.arange(threads) ** 2).reshape(3, 32)
    np.testing.assert_array_equal(before, np.tile((squares.cumsum(1) - squares).ravel(), (blocks, 1)))
    np.testing.assert_array_equal(total, np.tile(np.repeat(squares.sum(1), 32), (blocks, 1)))


def test_warp_operations_return_what_cuda_returns(scheduled):
    out = np.full((22, 64), -1, np.int64)
    assert scheduled.run("run_warp_operations", out) == ""
    thread = np.arange(64)
    lane, warp = thread % 32, thread // 32 * 32
    group = np.where(lane < 12, 11, 12)

    def mask(members: np.ndarray) -> int:
        return int((members.astype(np.int64) << np.arange(32)).sum())

    expected = [
        100 + warp + (lane * 7 + 3) % 32,
        100 + warp + lane // 8 * 8 + 2,
        100 + np.where(lane < 3, thread, thread - 3),
        100 + np.where(lane % 16 < 3, thread, thread - 3),
        100 + np.where(lane + 5 > 31, thread, thread + 5),
        100 + np.where(lane % 8 + 5 > 7, thread, thread + 5),
        100 + (thread ^ 9),
        (1 << 40) | (thread ^ 16),
        2 * (thread ^ 1) + 1,
        [mask((warp[t] + np.arange(32)) % 3 == 0) for t in thread],
        thread >= 32,
        thread < 32,
        [mask((warp[t] + np.arange(32)) % 5 == t % 5) for t in thread],
        100 + warp + group,
        lane < 12,
        np.full(64, 22),
        np.full(64, 1),
        np.full(64, 0),
        [t.bit_count() * 10000 + (32 - t.bit_length()) * 100 + (t & -t).bit_length() for t in range(64)],
    ]
    for row, values in enumerate(expected):
        np.testing.assert_array_equal(out[row], np.asarray(values).astype(np.int64), err_msg=f"operation {row}")


def test_atomics_lose_no_update(scheduled):
    word = np.array([0, 2**32 - 1, 0, 0, 0], np.uint32)
    shared = np.zeros(1, np.int32)
    assert scheduled.run("run_atomics", word, shared) == ""
    assert word.tolist() == [255 * 128, 5, 255, 2**32 - 1, 7]
    assert shared[0] == 64


def _sequence(toy_library: Toys, grid: tuple[int, int, int], block: tuple[int, int, int]) -> np.ndarray:
    count = int(np.prod(grid) * np.prod(block))
    out = np.full(count, -1, np.int32)
    arguments = (np.array(grid, U32), np.array(block, U32), np.zeros(1, np.int32), out)
    assert toy_library.run("run_sequence", *arguments) == ""
    return out


def test_schedules_order_blocks_and_threads(toy_library):
    grid, block = (3, 2, 2), (4, 3, 5)
    everyone = np.arange(12 * 60)
    toy_library.set_schedule("forward")
    np.testing.assert_array_equal(_sequence(toy_library, grid, block), everyone)
    toy_library.set_schedule("reverse")
    np.testing.assert_array_equal(_sequence(toy_library, grid, block), everyone[::-1])
    toy_library.set_schedule("shuffled", seed=1)
    first = _sequence(toy_library, grid, block)
    assert not np.array_equal(first // 60, np.sort(first // 60)), "blocks out of order"
    assert not np.array_equal(first, everyone)
    np.testing.assert_array_equal(np.sort(first), everyone)
    toy_library.set_schedule("shuffled", seed=2)
    assert not np.array_equal(_sequence(toy_library, grid, block), first)
    toy_library.set_schedule("shuffled", seed=1)
    np.testing.assert_array_equal(_sequence(toy_library, grid, block), first)
    toy_library.set_schedule("forward")


def test_an_unknown_schedule_is_refused(toy_library):
    assert toy_library.library.kvc_emulation_set_schedule(3, 0) != 0
    assert toy_library.library.kvc_emulation_set_schedule(-1, 0) != 0


def _neighbours(toy_library: Toys, write_barrier: bool, read_barrier: bool) -> list[bytes]:
    x = np.arange(64, dtype=np.float32)
    results = []
    for schedule in SCHEDULES:
        toy_library.set_schedule(schedule, seed=5)
        out = np.zeros((2, 64), np.float32)
        assert toy_library.run("run_neighbours", x, out, int(write_barrier), int(read_barrier)) == ""
        results.append(out.tobytes())
    toy_library.set_schedule("forward")
    return results


def test_schedules_differ_where_a_barrier_is_missing(toy_library):
    x = np.arange(64, dtype=np.float32)
    whole = _neighbours(toy_library, True, True)
    np.testing.assert_array_equal(np.frombuffer(whole[0], np.float32)[:64], np.maximum(x - 1, 0))
    np.testing.assert_array_equal(np.frombuffer(whole[0], np.float32)[64:], np.minimum(x + 1, 63) + 1)
    assert len(set(whole)) == 1
    assert len(set(_neighbours(toy_library, False, True))) > 1, "read before it was written"
    assert len(set(_neighbours(toy_library, True, False))) > 1, "overwritten before it was read"


def test_shared_memory_of_a_new_block_is_nan(scheduled):
    as_float, as_int = np.zeros(3, np.float32), np.zeros(1, np.int32)
    assert scheduled.run("run_fresh_memory", as_float, as_int) == ""
    assert np.isnan(as_float).all()
    assert as_int[0] == 0x7FFF7FFF


# The message after "kernel NAME block (0,0,0)" in the forward schedule.
MISTAKES = {
    "exit_before_barrier": r"divergent barrier: thread \(\d+,0,0\) is at __syncthreads \(mistakes.cu:\d+\) "
    r"with 62 others, thread \(37,0,0\) has exited with 0 others",
    "barrier_in_both_branches": r"divergent barrier: thread \(0,0,0\) is at __syncthreads \(mistakes.cu:\d+\), "
    r"thread \(32,0,0\) is at __syncthreads \(mistakes.cu:\d+\)",
    "one_barrier_too_many": r"divergent barrier: thread \(5,0,0\) is at __syncthreads .* with 0 others, "
    r"thread \(0,0,0\) has exited with 62 others",
    "exited_lane": r"lane missing: thread \(32,0,0\) is at __shfl_xor_sync\(mask ffffffff\) .*, "
    r"but lane 8, thread \(40,0,0\) has exited",
    "lane_at_barrier": r"lane missing: thread \(0,0,0\) is at __syncwarp\(mask ffffffff\) .*, "
    r"but lane 3, thread \(3,0,0\) is at __syncthreads",
    "lanes_at_different_operations": r"lane missing: thread \(0,0,0\) is at __ballot_sync\(mask ffffffff\) .*, "
    r"but lane 16, thread \(16,0,0\) is at __shfl_sync",
    "lanes_with_different_masks": r"lane missing: thread \(0,0,0\) is at __syncwarp\(mask ffffffff\) .*, "
    r"but lane 1, thread \(1,0,0\) has exited",
    "outside_own_mask": r"thread \(16,0,0\): .*__syncwarp\(mask 0000ffff\) .* is not in its own mask",
    "source_outside_mask": r"shuffle: lane 0 reads lane 16, which is not in the mask",
    "past_the_end": r"thread \(42,0,0\): shared access \[64\] of 64",
    "before_the_start": r"thread \(0,0,0\): shared access \[-1\] of 64",
    "part_past_the_end": r"thread \(57,0,0\): shared access \[64\] of 64",
    "past_the_launch": r"dynamic shared array of 256 bytes at offset 32, but the launch gave 64",
    "misaligned_dynamic": r"shared memory 2 bytes past a multiple of 4",
    "misaligned_cast": r"shared memory 4 bytes past a multiple of 16",
    "too_much_static": r"static shared memory grows to 49168 bytes with second, more than 49152",
    "misaligned_vector": r"misaligned 16-byte access, 4 bytes past a multiple of 16",
    "misaligned_store": r"misaligned 8-byte access, 4 bytes past a multiple of 8",
    "misaligned_copy": r"misaligned 16-byte access, 4 bytes past a multiple of 16",
    "copy_without_wait": r"thread \(9,0,0\): exits without a wait for what cp.async has started",
    "wait_without_commit": r"thread \(9,0,0\): exits without a wait for what cp.async has started",
    "copy_to_global": r"cp.async outside shared memory",
    "exit_before_wait": r"thread \(37,0,0\): exits without wait_for_previous_launch",
    "no_wait": r"thread \(0,0,0\): exits without wait_for_previous_launch",
    "copy_before_wait": r"thread \(0,0,0\): touches global memory before wait_for_previous_launch",
    "atomic_before_wait": r"thread \(0,0,0\): touches global memory before wait_for_previous_launch",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_with_its_place(toy_library, name):
    toy_library.set_schedule("reverse")  # so that the first block that runs is not block 0
    message = toy_library.run("run_mistake", name, 3, 64, aligned(64, np.float32))
    assert message.startswith(f"kernel {name} block (2,0,0)")
    toy_library.set_schedule("forward")
    message = toy_library.run("run_mistake", name, 3, 64, aligned(64, np.float32))
    assert message.startswith(f"kernel {name} block (0,0,0)")
    assert re.search(MISTAKES[name], message), message
    assert len(message) < 256, "fits a KvcMessage"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_in_every_schedule_and_the_next_launch_is_well(scheduled, name):
    assert scheduled.run("run_mistake", name, 2, 64, aligned(64, np.float32)) != ""
    test_atomics_lose_no_update(scheduled)


def test_a_lane_beyond_the_block_counts_as_missing(toy_library):
    message = toy_library.run("run_mistake", "lane_at_barrier", 1, 40, aligned(64, np.float32))
    assert "lane" in message
    assert "does not exist" in toy_library.run("run_mistake", "exited_lane", 1, 40, aligned(64, np.float32))


LIMITS = {
    "threads": ((1, 1, 1), (1025, 1, 1), 0, "a block of 1025 threads"),
    "block product": ((1, 1, 1), (32, 32, 2), 0, "a block of 2048 threads"),
    "block z": ((1, 1, 1), (1, 1, 65), 0, "a block of 65 threads"),
    "empty block": ((1, 1, 1), (0, 1, 1), 0, "a block of 0 threads"),
    "empty grid": ((1, 0, 1), (1, 1, 1), 0, "an empty grid"),
    "grid y": ((1, 65536, 1), (1, 1, 1), 0, "a grid beyond"),
    "grid z": ((1, 1, 65536), (1, 1, 1), 0, "a grid beyond"),
    "grid x": ((2**31, 1, 1), (1, 1, 1), 0, "a grid beyond"),
    "shared": ((1, 1, 1), (1, 1, 1), 163 * 1024 + 1, "0 bytes of static and 166913 of dynamic shared memory"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_launch_beyond_the_limits_of_a_device_is_refused(toy_library, case):
    grid, block, dynamic, message = LIMITS[case]
    arguments = (np.array(grid, U32), np.array(block, U32), ctypes.c_uint64(dynamic))
    assert message in toy_library.run("run_limits", *arguments)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_memory_is_refused_at_the_byte(toy_library, architecture):
    """Static and dynamic together: 48 KiB, and all that a block of this device has if the launcher asks for it."""
    limits, static, out = MULTIPROCESSORS[architecture], 1040 * 4, aligned(64, np.float32)
    most = limits.shared_bytes - limits.reserved_shared
    fits, too_much = ([ctypes.c_uint64(most - static + more), out] for more in (0, 1))
    toy_library.set_device(architecture)
    try:
        if architecture == ARCHITECTURES[0]:  # the others share the launcher's memory of what was allowed
            assert toy_library.run("run_unasked", ctypes.c_uint64(48 * 1024 - static), out) == ""
            found = toy_library.run("run_unasked", ctypes.c_uint64(48 * 1024 - static + 1), out)
            assert "static and dynamic shared memory take 49153 bytes, more than 49152" in found
            found = toy_library.run("run_unasked", ctypes.c_uint64(48 * 1024 + 1), out)
            assert (
                f"49153 bytes of dynamic shared memory beside 0 of static on {architecture}, allowed are 49152" in found
            )
        assert toy_library.run("run_asked", *fits) == ""
        assert f"take {most + 1} bytes, more than {most}" in toy_library.run("run_asked", *too_much)
    finally:
        toy_library.set_device(ARCHITECTURES[0])


def test_registers_of_a_block_are_limited(toy_library):
    """sparse_attention<fp32, 256> has more than 128 a thread, and more static memory here than nvcc has counted."""
    out = aligned(64, np.float32)
    found = toy_library.run("run_counted", 512, out)
    assert re.search(r"512 threads of \d{3} registers on sm_80, a block has 65536", found)
    assert re.search(
        r"static shared memory grows to 2048 bytes with more, more than \d+", toy_library.run("run_counted", 32, out)
    )


def test_an_unknown_device_is_refused(toy_library):
    assert toy_library.library.kvc_emulation_set_device(b"sm_75") != 0


def test_launches_are_recorded(toy_library):
    toy_library.clear_launches()
    assert toy_library.launches() == []
    test_atomics_lose_no_update(toy_library)
    _sequence(toy_library, (3, 2, 2), (4, 3, 5))
    first, second = toy_library.launches()
    assert (first.name, list(first.grid), list(first.block)) == (b"atomics", [4, 1, 1], [64, 1, 1])
    assert (first.static_shared_bytes, first.dynamic_shared_bytes) == (16, 0)
    assert (second.name, list(second.grid), list(second.block)) == (b"sequence", [3, 2, 2], [4, 3, 5])
    assert second.switches == 12 * 60, "a thread that waits for no other runs in one go"


def test_collective_operations_are_counted(toy_library):
    toy_library.clear_launches()
    test_reductions_give_every_thread_the_same_bits_in_every_schedule(toy_library)
    (launch,) = toy_library.launches()
    blocks = launch.grid[0]
    # Each of three warps runs a sum and a maximum of five shuffles each, a scan of five and one for its total.
    assert (launch.products, launch.exchanges, launch.barriers) == (0, 16 * 3 * blocks, blocks)


def test_executions_are_those_of_the_lane_with_most_and_of_all_lanes():
    counting = toys.executions()
    rounds = np.array([[0] * 40 + [7] + [2] * 23, [3] * 64], np.int32)
    sums = np.zeros_like(rounds)
    counting.clear_launches()
    assert counting.run("run_rounds", 2, 64, rounds, sums) == ""
    counts = [(one.warps, one.longest, one.lanes) for one in counting.executions() if one.kernel == b"rounds"]
    # The loop: none and 7 rounds in the warps of the first block, 3 and 3 in those of the second.
    assert (7 + 3 + 3, 7 + 3, 7 + 23 * 2 + 64 * 3) in counts
    assert max(counts)[:2] <= (4 + 7 + 3 + 3, 2 + 7 + 3), "the test of the loop runs once more than its body"
    counting.clear_launches()
    assert counting.executions() == []


def test_executions_are_counted_only_where_the_compiler_was_asked(toy_library):
    toy_library.clear_launches()
    _sequence(toy_library, (3, 2, 2), (4, 3, 5))
    assert toy_library.executions() == []
