"""Samples are taken in turn, in blocks, at least two blocks of each side, never more than asked for."""

from __future__ import annotations

import pytest

from kvc_trt.profile import profiled_engine
from kvc_trt.profile.profiled_engine import BLOCK, time_block, time_decode


class FakeRun:
    def __init__(self, log, name, seconds):
        self.log, self.name, self.seconds = log, name, seconds

    def step_seconds(self):
        self.log.append(self.name)
        return self.seconds


def test_sides_take_turns_block_by_block():
    log = []
    engine, dense = time_decode([FakeRun(log, "engine", 1.0), FakeRun(log, "dense", 3.0)], 25, seconds=1e9)
    turn = ["engine"] * (BLOCK + 1) + ["dense"] * (BLOCK + 1)
    assert log == turn * 3
    assert (engine.steps.samples, dense.steps.samples) == (30, 30)
    assert (engine.steps.mean, dense.steps.mean) == (1.0, 3.0)
    assert engine.blocks.samples == 3


def test_time_ends_a_row_but_not_before_two_blocks(monkeypatch):
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(profiled_engine.time, "perf_counter", lambda: float(next(clock)))
    log = []
    (found,) = time_decode([FakeRun(log, "engine", 1.0)], 1000, seconds=1.0)
    assert found.steps.samples == 2 * BLOCK


@pytest.mark.parametrize("steps", [1, 3])
def test_few_steps_are_all_counted(steps):
    (found,) = time_decode([FakeRun([], "engine", 1.0)], steps, seconds=0.0)
    assert found.steps.samples == 2 * steps


def test_the_first_step_of_a_block_is_not_counted():
    log = []
    assert time_block(FakeRun(log, "engine", 1.0), 3) == [1.0] * 3
    assert len(log) == 4
