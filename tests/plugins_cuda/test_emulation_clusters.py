"""Blocks of a cluster run side by side, meet at their barrier, and reach into each other's shared memory."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.plugins_cuda import toys
from tests.plugins_cuda.toys import SCHEDULES, aligned

PLACE = r"kernel \w+ block \(\d,0,0\)"
THREAD = rf"{PLACE} thread \(\d+,0,0\)"
# The text of the report; each toy has a variant that is in order and must pass.
RACES = {
    "written_to_the_next": r"shared array values byte \d+",
    "read_from_the_last": r"dynamic shared memory byte \d+",
    "written_after_arriving": r"shared array values byte \d+",
    "announced": r"shared array values byte \d+",
    "announced_behind_a_fence": r"global memory: (read|written) by thread \(\d+,0,0\) of block \(\d,0,0\)",
    "counted": r"shared array count byte [04]",
    "through_global_memory": r"global memory: (read|written) by thread \(\d+,0,0\) of block \(\d,0,0\)",
}
MISTAKES = {
    "before_it_has_begun": rf"{THREAD}: accesses shared memory of block number \d before a barrier of the cluster",
    "leaves_early": rf"{THREAD}: (ends its block, whose shared memory {THREAD} accesses with no barrier|"
    r"accesses shared memory of block number \d, which has ended)",
    "exits_before_the_barrier": r"kernel \w+ block \(1,0,0\): divergent barrier of the cluster: thread \(5,0,0\) has "
    rf"exited, {THREAD} is at .* with \d+ others",
    "at_a_barrier_of_the_block": rf"{PLACE}: divergent barrier: thread \(5,0,0\) is at __syncthreads .* with 0 others",
    "at_two_lines": rf"{THREAD}: divergent barrier of the cluster: {THREAD} is at .*, thread .* is at ",
    "arrives_twice": rf"{THREAD}: arrives at the cluster's barrier again and has not waited",
    "waits_without_arriving": rf"{THREAD}: waits at the cluster's barrier without having arrived",
    "exits_without_waiting": rf"{THREAD}: exits without waiting for the barrier of the cluster",
    "of_no_block": rf"{THREAD}: block 2 of a cluster of 2",
    "past_the_end_of_anothers": rf"{THREAD}: shared access \[64\] of 64",
}


@pytest.fixture(autouse=True)
def _later_device() -> None:
    toys.clusters().set_device("sm_90a")


def run(name: str, schedule: str, right: bool, blocks: int = 2, grid: int | None = None) -> tuple[str, np.ndarray]:
    """Return the message of a launch of two clusters, and the numbers that its threads wrote."""
    library = toys.clusters()
    library.set_schedule(schedule, seed=11)
    count = 2 * blocks if grid is None else grid
    out = aligned((max(count, 1), 64), np.int32, -1)
    return library.run("run_clusters", name, int(right), count, blocks, out), out


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_blocks_exchange_through_shared_memory(blocks: int, schedule: str) -> None:
    number, thread = np.arange(2 * blocks)[:, None], np.arange(64)[None]
    first = number // blocks * blocks
    message, out = run("written_to_the_next", schedule, True, blocks)
    assert message == ""
    before = first + (number - first - 1) % blocks
    assert np.array_equal(out, 100 * before + (thread ^ 32))
    message, out = run("read_from_the_last", schedule, True, blocks)
    assert message == ""
    assert np.array_equal(out, 100 * (first + blocks - 1) + (thread ^ 1))
    message, out = run("counted", schedule, True, blocks)
    assert message == ""
    assert (out == 32 * blocks * (blocks + 1) // 2).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", RACES)
def test_a_race_is_reported(name: str, schedule: str) -> None:
    message, _ = run(name, schedule, right=False)
    assert re.match(rf"{PLACE}: race on {RACES[name]}", message), message


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(name: str, schedule: str) -> None:
    message, _ = run(name, schedule, right=False)
    assert re.match(MISTAKES[name], message), message


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [*RACES, *MISTAKES])
def test_ordered_cluster_accesses_pass(name: str, schedule: str) -> None:
    assert run(name, schedule, right=True)[0] == ""


def test_clusters_that_a_gpu_refuses_are_refused() -> None:
    library = toys.clusters()
    assert "clusters of 16 blocks, allowed are 8" in run("counted", "forward", True, 16)[0]
    assert "a grid of 6 blocks along x in clusters of 4 blocks" in run("counted", "forward", True, 4, grid=6)[0]
    library.set_device("sm_80")
    assert "clusters of 2 blocks on sm_80, which has none" in run("counted", "forward", True, 2)[0]
    assert run("counted", "forward", True, 1)[0] == "", "a cluster of one block is none"


def test_a_launch_after_one_that_failed_is_unharmed() -> None:
    assert run("exits_before_the_barrier", "forward", right=False, blocks=8)[0]
    assert run("counted", "forward", right=True, blocks=2)[0] == ""


def test_launches_say_their_clusters() -> None:
    library = toys.clusters()
    library.clear_launches()
    run("counted", "forward", right=True, blocks=4)
    (launch,) = library.launches()
    assert (launch.cluster_blocks, launch.cluster_barriers) == (4, 3 * 2 * 4)
