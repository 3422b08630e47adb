"""KvcDeltaRule and KvcDeltaStep by the native library, beside the reference, for every instruction set."""

from __future__ import annotations

from pathlib import Path

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
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode

BAR = 1e-5
PARTS = st.builds(
    lambda key_heads, shared, key_size, value_size, kernel: Linear(
        key_heads, key_heads * shared, key_size, value_size, kernel
    ),
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(1, 150), st.integers(2, 5),
)  # fmt: skip
PUBLISHED = Linear(key_heads=2, value_heads=4, key_size=128, value_size=128, kernel=4)


def natively(case: LinearCase, library: Path, *, step: bool = False, threads: int = 1) -> tuple[np.ndarray, ...]:
    layout = Layout(HeadShape(None, None, 0), numbers={KERNEL: case.part.kernel})
    node = NativeNode((DELTA_STEP if step else DELTA_RULE).body(layout), {}, library, threads)
    found = node.named(dict(case.inputs))
    return found["output"], found["last_inputs_out"], found["memory_out"]


@settings(deadline=None, max_examples=40)
@given(
    part=PARTS, lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3), repeated=st.booleans(),
    seed=st.integers(0, 100), instructions=ANY_INSTRUCTIONS,
)  # fmt: skip
def test_random_shapes_equal_the_exact_recurrence(
    library: Path, part: Linear, lengths: list[int], repeated: bool, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    case = linear_case(part, np.random.default_rng(seed), tuple(lengths), repeated=repeated)
    assert case.error(*natively(case, library)) <= BAR


@settings(deadline=None, max_examples=20)
@given(part=PARTS, rows=st.integers(1, 3), seed=st.integers(0, 100), instructions=ANY_INSTRUCTIONS)
def test_a_step_equals_the_exact_recurrence(
    library: Path, part: Linear, rows: int, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    case = linear_case(part, np.random.default_rng(seed), (1,) * rows, step=True)
    assert case.error(*natively(case, library, step=True)) <= BAR


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_prompt_of_a_published_shape_is_right(library: Path, instructions: str, threads: int) -> None:
    case = linear_case(PUBLISHED, np.random.default_rng(3), (4 * CHUNK + 3, 1, CHUNK), repeated=False)
    assert case.error(*natively(case, library, threads=threads)) <= BAR


def test_prompts_and_steps_have_the_same_bits(library: Path, instructions: str) -> None:
    """So a conversation that is read at once answers as one that was read token by token."""
    case = linear_case(PUBLISHED, np.random.default_rng(4), (9,))
    output, last, memory = natively(case, library)
    inputs = dict(case.inputs)
    del inputs["lengths"]
    for token in range(9):
        own = {name: np.ascontiguousarray(case.inputs[name][:, token]) for name in ("mixed", "write", "decay")}
        read, *state = natively(LinearCase(PUBLISHED, {**inputs, **own}, (1,)), library, step=True)
        np.testing.assert_array_equal(read, output[:, token])
        inputs |= dict(zip(("last_inputs", "memory"), state, strict=True))
    np.testing.assert_array_equal(inputs["last_inputs"], last)
    np.testing.assert_array_equal(inputs["memory"], memory)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_padding_and_neighbours_leave_no_trace(library: Path, instructions: str, length: int) -> None:
    case = linear_case(PUBLISHED, np.random.default_rng(5), (length, 20))
    inputs = {name: value.copy() for name, value in case.inputs.items()}
    for name in ("mixed", "write", "decay"):
        inputs[name][0, length:] = np.nan
        inputs[name][1] = 0
    before, after = natively(case, library), natively(LinearCase(case.part, inputs, case.lengths), library)
    for one, other in zip(before[1:], after[1:], strict=True):
        np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(before[0][0, :length], after[0][0, :length])
    assert (after[0][0, length:] == 0).all()


def test_nan_stays_in_its_heads(library: Path, instructions: str) -> None:
    case = linear_case(PUBLISHED, np.random.default_rng(6), (1, 1), step=True)
    case.inputs["write"][0, 1] = np.nan
    output, _, memory = natively(case, library, step=True)
    for found in (output, memory):
        bad = ~np.isfinite(found.reshape(2, 4, -1)).all(axis=2)
        assert np.argwhere(bad).tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("last_inputs", lambda table: table[:, 1:], "last_inputs: expected 3 tokens, found 2"),
        ("lengths", lambda lengths: lengths + 9, "lengths: expected 0..4, found 13"),
        ("memory", lambda table: table[:, :, :7], "mixed: expected channels of queries, keys and 512 values"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(library: Path, name: str, change, message: str) -> None:
    case = linear_case(PUBLISHED, np.random.default_rng(7), (4,))
    inputs = {**case.inputs, name: np.ascontiguousarray(change(case.inputs[name]))}
    with pytest.raises(Exception, match=message):
        natively(LinearCase(PUBLISHED, inputs, case.lengths), library)
