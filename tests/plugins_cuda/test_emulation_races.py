"""The race detector reports accesses without order, in every schedule, and nothing else."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.plugins_cuda import toys
from tests.plugins_cuda.toys import SCHEDULES, aligned

# The names in the report; each race has a variant that is in order and must pass.
RACES = {
    "written_then_read": r"shared array row byte \d+: .*(read|written) by thread",
    "read_then_written": r"shared array first byte 0: read by thread .* past __syncthreads \(races.cu:\d+\), "
    r"then written by thread \(40,0,0\)",
    "same_value_twice": r"shared array flag byte 0: written by thread .*, then written by thread",
    "within_a_warp": r"shared array row .* __shfl_sync",
    "within_half_a_warp": r"shared array row .* __syncwarp",
    "counted": r"shared array count byte 0: .*by an atomic",
    "copied": r"shared array row byte \d+",
    "copied_with_neighbour": r"global memory: (read|written) by thread number 0 of block number \d, then ",
    "one_row_per_block": r"global memory: written by thread number \d+ of block number \d, then written by thread",
    "merged": r"global memory: written by thread number \d+ of block number \d, then read by thread",
    "merged_by_arriver": r"global memory: written by thread number \d+ of block number \d, then read by thread",
}
EARLY = ("read_early", "written_early")


def _run(name: str, schedule: str, right: bool) -> str:
    library = toys.races()
    library.set_schedule(schedule, seed=7)
    zero = np.zeros(1, np.uint32)
    return library.run("run_race", name, int(right), aligned(128, np.float32), zero, aligned(128, np.float32))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", RACES)
def test_a_race_is_reported(name, schedule):
    message = _run(name, schedule, right=False)
    assert re.match(rf"kernel {name} block \([01],0,0\): race on {RACES[name]}", message), message


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", EARLY)
def test_global_memory_before_the_wait_is_reported(name, schedule):
    """Covers memory that the launch before may still write, or read."""
    message = _run(name, schedule, right=False)
    place = rf"kernel {name} block \([01],0,0\) thread \(\d+,0,0\)"
    assert re.match(rf"{place}: touches global memory before wait_for_previous_launch", message), message


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [*RACES, *EARLY])
def test_ordered_accesses_pass(name, schedule):
    assert _run(name, schedule, right=True) == ""
