"""A conversation of two hundred turns takes no more memory than one of a few, under every policy that evicts."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt import policies
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.errors import InputError
from kvc_trt.runtime import Request, Session

TURNS, LONGEST, ANSWER = 200, 30, 3
POSITIONS = 100 + TURNS * (LONGEST + ANSWER)
EVICTING = [
    one.name
    for one in policies.describe()
    if policies.named(one.name).eviction.evicts
    and policies.named(one.name).eviction.turn is not None
    and not policies.named(one.name).eviction.keeps_whole
]


@pytest.mark.one_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("policy", [one for one in EVICTING if one != "duo-attention"])  # it keeps whole caches
def test_bytes_are_equal_over_two_hundred_turns(policy, make_program):
    program = make_program(policy, turns=True, max_input_len=128, max_output_len=8, max_conversation_len=POSITIONS)
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=1))
    session = Session(executor, None, 1)
    generator = np.random.default_rng(0)
    (row,) = session.add([Request(generator.integers(2, 97, 100).tolist(), ANSWER, ignore_eos=True, stay=True)])
    allocated, addresses = executor.state_bytes(), {name: one.ctypes.data for name, one in executor.buffers.items()}
    stored = []
    for turn in range(TURNS):
        while session.rows:
            session.step()
        session.turn(row, generator.integers(2, 97, 1 + turn % LONGEST).tolist())
        stored.append(session.stored(row)[1])
    assert executor.state_bytes() == allocated == sum(tensor.bytes_per_row() for tensor in executor.program.state)
    assert {name: one.ctypes.data for name, one in executor.buffers.items()} == addresses
    assert len(set(stored[TURNS // 10 :])) == 1, "what a turn leaves does not grow"
    assert all(np.isfinite(one).all() for one in executor.buffers.values())
    while (left := POSITIONS - session.stored(row)[0]) >= 128:
        session.turn(row, [5] * 128)
    with pytest.raises(InputError, match=f"ends at position {POSITIONS + 1}, expected at most {POSITIONS}"):
        session.turn(row, [5] * (left + 1))
    session.turn(row, [5] * left)
