"""The model of memory against what is really allocated."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvc_trt.engine.program import engine_program, twin_program
from kvc_trt.profile.memory import MemoryLine, peak_resident_bytes, prefill_memory, standing_memory, watch_memory
from kvc_trt.profile.subject import DecodeRun, open_subject


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_modelled_memory_is_what_is_allocated(engine, rows, dense):
    program = twin_program(engine) if dense else engine_program(engine)
    subject = open_subject("subject", program, 1)
    DecodeRun(subject, rows, 200)
    lines = {line.kind: line for line in standing_memory(subject, rows)}
    assert set(lines) == {"weights", "cache"} if dense else {"weights", "cache", "page bounds"}
    assert all(abs(line.difference_percent) < 1 for line in lines.values())
    state = sum(line.measured for kind, line in lines.items() if kind != "weights")
    assert state == subject.executor.state_bytes()


def test_a_peak_is_seen():
    size = 96 << 20
    with watch_memory() as peak:
        block = np.ones(size, np.uint8)
        deadline = time.monotonic() + 30
        while peak.above < size and time.monotonic() < deadline:
            time.sleep(0.001)  # the sampler needs a turn while the block is there
        del block
    assert 0.9 * size < peak.above < 2 * size
    assert peak_resident_bytes() > 0.9 * peak.highest  # the kernel counts the two lazily, each in its own way


def test_prefill_memory_is_linear_in_the_prompt(engine):
    program = engine_program(engine)
    state = prefill_memory(program, 1, 0)
    one, two = (prefill_memory(program, 1, tokens) - state for tokens in (4096, 8192))
    assert two == 2 * one > 0


def test_differences_in_percent():
    assert MemoryLine("cache", 100.0, 125.0, "allocated").difference_percent == 25
    assert MemoryLine("cache", 0.0, 5.0, "allocated").difference_percent == 0
