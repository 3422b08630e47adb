"""Blocks of a cluster send each other asynchronous stores and copy in bulk, and mbarriers count the bytes.

Mistakes with them are reported.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.plugins_cuda import toys
from tests.plugins_cuda.toys import SCHEDULES, aligned

PLACE = r"kernel \w+ block \(\d,0,0\)"
THREAD = rf"{PLACE} thread \(\d+,0,0\)"
MBARRIER = r"mbarrier in shared array counters byte \d"
# The text of the report; each toy has a variant that is in order and must pass.
RACES = {
    "sent_to_the_next": r"shared array values byte \d+",
    "sent_in_vectors": r"shared array others byte \d+",
    "waited_for_by_one": r"shared array values byte \d+",
    "sent_over_others": r"shared array values byte \d+",
    "global_memory_beside": r"global memory: (read|written) by thread \(\d+,0,0\) of block \(\d,0,0\)",
    "sent_by_two": r"shared array values byte \d+",
    "copied_in_bulk": r"shared array values byte \d+",
    "written_under_a_copy": r"global memory: (read|written) by thread \(\d+,0,0\)",
    "written_over_a_copy": r"shared array values byte 20",
    "copied_over_what_was_written": r"shared array values byte \d+",
    "copied_from_what_was_written": r"global memory: written by thread \(\d+,0,0\)",
}
UNKNOWN = rf"{THREAD}: uses the {MBARRIER}, of which nothing tells it that it was made"
MISTAKES = {
    "too_few_bytes": rf"{PLACE}: thread \(0,0,0\) is at an mbarrier \(cluster_inbox.cuh:\d+\): the {MBARRIER}, which "
    "lacks 1 arrivals and 4 bytes|"
    rf"{PLACE}: thread \(0,0,0\) is at an mbarrier \(cluster_inbox.cuh:\d+\): the {MBARRIER}, which lacks 0 arrivals "
    "and 4 bytes",
    "too_many_bytes": rf"{THREAD}: the {MBARRIER} has 2 bytes more than it expects",
    "a_store_too_many": rf"{THREAD}: ends its block, and the {MBARRIER} has bytes that it does not expect",
    "without_a_fence": UNKNOWN,
    "a_fence_too_late": UNKNOWN,
    "before_a_barrier_of_the_block": rf"{UNKNOWN}|{THREAD}: uses an {MBARRIER}, where none was made",
    "before_the_cluster_has_met": rf"{THREAD}: accesses shared memory of block number \d before a barrier",
    "at_no_mbarrier": rf"{THREAD}: uses an {MBARRIER}, where none was made",
    "made_twice": rf"{THREAD}: makes the {MBARRIER} again",
    "expected_twice": rf"{THREAD}: arrives at an mbarrier at which all have arrived",
    "ends_before_its_bytes": rf"{THREAD}: (ends its block while the {MBARRIER}, which lacks 0 arrivals and \d+ bytes|"
    rf"ends its block, and no thread has waited for the bytes at the {MBARRIER})",
    "sent_to_one_that_has_ended": rf"{THREAD}: (accesses shared memory of block number \d, which has ended|"
    rf"ends its block, and the {MBARRIER} has bytes that it does not expect)",
    "copied_more_than_expected": rf"{THREAD}: the {MBARRIER} has 16 bytes more than it expects",
    "copied_in_part_vectors": rf"{THREAD}: copies 248 bytes in bulk, no multiple of 16",
    "ends_before_its_copy": rf"{THREAD}: (ends its block while the {MBARRIER}, which lacks 0 arrivals and \d+ bytes|"
    rf"ends its block, and no thread has waited for the bytes at the {MBARRIER})",
    "between_vectors": rf"{THREAD}: misaligned 16-byte access",
}


@pytest.fixture(autouse=True)
def _later_device() -> None:
    toys.mbarriers().set_device("sm_90a")


def run(name: str, schedule: str, right: bool, blocks: int = 2) -> tuple[str, np.ndarray]:
    """Return the message of a launch of two clusters, and the numbers that its threads wrote."""
    library = toys.mbarriers()
    library.set_schedule(schedule, seed=11)
    out = aligned((2 * blocks, 64), np.int32, -1)
    if "cop" in name:
        out[:] = np.arange(out.size).reshape(out.shape)
    return library.run("run_mbarriers", name, int(right), 2 * blocks, blocks, out), out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_blocks_get_what_others_send(blocks: int, schedule: str) -> None:
    number, thread = np.arange(2 * blocks)[:, None], np.arange(64)[None]
    before = number // blocks * blocks + (number - number // blocks * blocks - 1) % blocks
    for name, times in (("sent_to_the_next", 1), ("sent_in_vectors", 2)):
        message, out = run(name, schedule, True, blocks)
        assert message == ""
        assert np.array_equal(out, times * (100 * before + (thread ^ 32)))
    message, out = run("sent_over_others", schedule, True, blocks)
    assert message == ""
    assert (out == 3).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_block_gets_what_it_copies(schedule: str) -> None:
    rows = np.arange(4 * 64).reshape(4, 64)
    message, out = run("copied_in_bulk", schedule, True)
    assert message == ""
    assert np.array_equal(out, rows[:, np.arange(64) ^ 32] + 1)
    message, out = run("written_over_a_copy", schedule, True)
    assert message == ""
    assert (out[:, 5] == 7).all()
    assert np.array_equal(np.delete(out, 5, 1), np.delete(rows, 5, 1))


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
def test_ordered_stores_pass(name: str, schedule: str) -> None:
    assert run(name, schedule, right=True)[0] == ""


def test_a_launch_after_one_that_failed_is_unharmed() -> None:
    assert run("too_few_bytes", "forward", right=False)[0]
    assert run("sent_to_the_next", "forward", right=True)[0] == ""
