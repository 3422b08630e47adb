"""KvcDeltaRule and KvcDeltaStep by their bodies beside the reference, which takes in a token at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.models.config import Linear
from kvc_trt.operators.linear.delta_rule import CHUNK, DELTA_RULE
from kvc_trt.operators.linear.delta_step import DELTA_STEP
from kvc_trt.operators.linear.tokens import KERNEL
from kvc_trt.operators.shapes import HeadShape, Layout
from kvc_trt.verify.rungs.parts.linear_layers import LinearCase, linear_case
from tests.graph.small_models import SingleNode

PART = Linear(key_heads=2, value_heads=4, key_size=16, value_size=8, kernel=4)
LAYOUT = Layout(HeadShape(None, None, 0), numbers={KERNEL: PART.kernel})
RULE, STEP = (SingleNode(operator.body(LAYOUT), {}) for operator in (DELTA_RULE, DELTA_STEP))
BAR = 1e-5


def run(node: SingleNode, case: LinearCase) -> tuple[np.ndarray, ...]:
    found = node.named(dict(case.inputs))
    return found["output"], found["last_inputs_out"], found["memory_out"]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=3), st.booleans(), st.integers(0, 100))
def test_chunks_take_in_what_single_tokens_do(lengths: list[int], repeated: bool, seed: int) -> None:
    case = linear_case(PART, np.random.default_rng(seed), tuple(lengths), repeated=repeated)
    assert case.error(*run(RULE, case)) <= BAR


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 3), st.integers(0, 100))
def test_a_step_equals_the_exact_recurrence(rows: int, seed: int) -> None:
    case = linear_case(PART, np.random.default_rng(seed), (1,) * rows, step=True)
    assert case.error(*run(STEP, case)) <= BAR


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_padding_and_neighbours_leave_no_trace(length: int) -> None:
    """Neither what stands in the padding nor a row beside it changes a bit of a row's state."""
    case = linear_case(PART, np.random.default_rng(5), (length, 2 * CHUNK))
    inputs = {name: value.copy() for name, value in case.inputs.items()}
    for name in ("mixed", "write", "decay"):
        inputs[name][0, length:] = 1e3
        inputs[name][1] = 0
    before, after = RULE.named(dict(case.inputs)), RULE.named(inputs)
    for name in ("last_inputs_out", "memory_out"):
        np.testing.assert_array_equal(before[name][0], after[name][0])
    np.testing.assert_array_equal(before["output"][0, :length], after["output"][0, :length])


def test_keys_that_repeat_without_decay_are_solved_exactly() -> None:
    """The powers of the system's matrix reach 10^17 here; its inverse does not."""
    case = linear_case(PART, np.random.default_rng(1), (2 * CHUNK,), repeated=True)
    inputs = {**case.inputs, "decay_bias": np.full(PART.value_heads, -40, np.float32)}
    inputs["write"] = np.full_like(inputs["write"], 20)
    hard = LinearCase(case.part, inputs, case.lengths)
    assert hard.error(*run(RULE, hard)) <= BAR
