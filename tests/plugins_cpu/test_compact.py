"""KvcCompact by the native library: the reference's choices for any shape, threads and processor."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_models import normal
from tests.operators import test_compact as bodies
from tests.operators.test_compact import LENGTHS, SIZE, inputs
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode


@cache
def native(library: Path, kernel: int = 5, budget: int = 40, threads: int = 1, fp8_bounds: int = 0) -> NativeNode:
    body = bodies.body_of(kernel, budget, fp8_bounds=fp8_bounds)
    return NativeNode(body.body, body.attributes, library, threads)


@pytest.mark.pairwise
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kernel", [1, 5, 63, 511])
def test_unequal_rows_equal_the_reference(
    library: Path, instructions: str, kv_heads: int, kernel: int, threads: int
) -> None:
    bodies.check(inputs(LENGTHS, kv_heads=kv_heads), kernel=kernel, compactor=native(library, kernel, threads=threads))


@settings(max_examples=120)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=4),
    st.sampled_from([1, 3, 7, 9, 33]),
    st.sampled_from([8, 9, 16, 40]),
    st.sampled_from([1, 5, 8]),
    st.integers(0, 10_000),
    st.booleans(),
    ANY_INSTRUCTIONS,
)
def test_any_batch_keeps_what_the_reference_keeps(
    library: Path, lengths: list[int], kernel: int, budget: int, window: int, seed: int, rounded: bool,
    instructions: str,
) -> None:  # fmt: skip
    """Rounded inputs repeat whole rows of scores, so that the tie rule decides."""
    use_at_most(library, instructions)
    arrays = inputs(lengths, window=window, rounded=rounded, seed=seed)
    bodies.check(arrays, budget, kernel, compactor=native(library, kernel, budget))


@pytest.mark.parametrize("unusual", [1.0, np.nan, 1e30, -1e30, -1e-30])
def test_fp8_bounds_are_the_references(library: Path, instructions: str, unusual: float) -> None:
    arrays = inputs(LENGTHS)
    arrays[1][-1, 0, 0, 3] = unusual
    bodies.check_bounds(native(library, fp8_bounds=1)(*arrays))


def test_equal_keys_tie_wherever_they_lie(library: Path, instructions: str) -> None:
    """Whole vectors and the remainder compute the same: the lowest win, and the window stays."""
    for length in (83, 96, 100):
        arrays = inputs((length,), seed=1)
        arrays[1][:] = normal(9, 1, 2, 1, SIZE)
        found = native(library)(*arrays)["indices"][0, :, :40]
        np.testing.assert_array_equal(found, [[*range(32), *range(length - 8, length)]] * 2)


def test_padding_is_never_seen(library: Path, instructions: str) -> None:
    arrays = inputs((150, 60), seed=3)
    clean = native(library)(*arrays)
    arrays[1][1, :, 60:], arrays[2][1, :, 60:] = 1e30, np.nan
    dirty = native(library)(*arrays)
    for name, value in clean.items():
        np.testing.assert_array_equal(dirty[name], value)


def test_large_scores_overflow_nowhere(library: Path, instructions: str) -> None:
    arrays = inputs((150, 60), seed=5)
    arrays[0] *= 300
    bodies.check(arrays, compactor=native(library))


@pytest.mark.parametrize("place", ["query", "key"])
def test_nan_ranks_below_every_number_in_its_head_alone(library: Path, instructions: str, place: str) -> None:
    """All votes of the KV head become NaN, so its lowest tokens stay, as in the body."""
    arrays = inputs((150,), seed=6)
    if place == "query":
        arrays[0][0, 1, 3] = np.nan
    else:
        arrays[1][0, 0, 2, 4] = np.nan
    found, body = native(library)(*arrays), bodies.body_of()(*arrays)
    np.testing.assert_array_equal(found["indices"], body["indices"])
    np.testing.assert_array_equal(found["indices"][0, 0, :32], np.arange(32))
    nan = np.isnan(found["bounds"])
    expected = np.zeros_like(nan)
    if place == "key":
        expected[0, 0, [4, 4 + SIZE], 0] = True
    np.testing.assert_array_equal(nan, expected)


def test_threads_do_not_change_a_bit(library: Path, instructions: str) -> None:
    arrays = inputs((150, 77, 30), kv_heads=4, seed=8)
    one, two = (native(library, threads=threads)(*arrays) for threads in (1, 2))
    for name, value in one.items():
        np.testing.assert_array_equal(two[name], value)


def test_bounds_that_nobody_reads_are_not_written(library: Path) -> None:
    node = NativeNode(bodies.body_of().body, bodies.body_of().attributes, library)
    arrays = inputs((100,), seed=2)
    whole = node(*arrays)
    model = node.model(tuple(str(array.dtype) for array in arrays))
    bounds = next(output for output in model.graph.output if output.name == "bounds")
    model.graph.output.remove(bounds)
    node.model = lambda types: model
    session = node.session(tuple(str(array.dtype) for array in arrays))
    results = session.run(None, dict(zip(node.body.input, arrays, strict=True)))
    for output, result in zip(session.get_outputs(), results, strict=True):
        np.testing.assert_array_equal(result, whole[output.name])
    assert len(results) == 4


def test_a_window_beyond_the_budget_is_refused(library: Path) -> None:
    with pytest.raises(Exception, match="prompt_budget: expected at least the window's 8, found 5"):
        native(library, budget=5)(*inputs((41,)))
