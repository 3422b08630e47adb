"""KvcCompactTurn by the native library: each row keeps the reference's choices by its own window."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.operators.compaction.compact import COMPACT_TURN
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.operators import test_compact as bodies
from tests.operators.test_compact import CAPACITY, PAGE, inputs
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode


@cache
def native(library: Path, kernel: int = 5, budget: int = 40, threads: int = 1) -> NativeNode:
    layout = Layout(HeadShape(None, None, 0), numbers={"pool_kernel": kernel})
    attributes = {
        "prompt_budget": budget, "capacity": CAPACITY, "pool_kernel": kernel, "page_size": PAGE, "fp8_bounds": 0
    }  # fmt: skip
    return NativeNode(COMPACT_TURN.body(layout), attributes, library, threads)


def check(arrays: list[np.ndarray], voting: list[int], node: NativeNode, budget: int = 40, kernel: int = 5) -> None:
    """Hold every row to the reference's compaction by the queries that vote; the others are NaN."""
    query, keys, values, lengths = arrays
    for row, count in enumerate(voting):
        query[row, :, : query.shape[2] - count] = np.nan
    found = node(*arrays, np.array(voting))
    for row, count in enumerate(voting):
        one = slice(row, row + 1)
        alone = [query[one, :, query.shape[2] - count :], keys[one], values[one], lengths[one]]
        result = {name: value[one] for name, value in found.items()}
        bodies.check(alone, budget, kernel, compactor=lambda *_, result=result: result)


@pytest.mark.pairwise
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kernel", [1, 5, 63])
def test_unequal_rows_and_windows_equal_the_reference(
    library: Path, instructions: str, kernel: int, threads: int
) -> None:
    arrays = inputs((200, 61, 60, 41, 40, 9), seed=3)
    check(arrays, [8, 1, 3, 7, 8, 2], native(library, kernel, threads=threads), kernel=kernel)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(8, 150), st.integers(1, 8)), min_size=1, max_size=4),
    st.sampled_from([1, 3, 9]),
    st.sampled_from([8, 16, 40]),
    st.integers(0, 10_000),
    st.booleans(),
    ANY_INSTRUCTIONS,
)
def test_any_batch_keeps_what_the_reference_keeps(
    library: Path, rows: list[tuple[int, int]], kernel: int, budget: int, seed: int, rounded: bool, instructions: str
) -> None:
    use_at_most(library, instructions)
    lengths, voting = zip(*rows, strict=True)
    arrays = inputs(lengths, rounded=rounded, seed=seed)
    check(arrays, list(voting), native(library, kernel, budget), budget, kernel)


@pytest.mark.parametrize("voting", [0, 9])
def test_a_window_that_the_queries_do_not_have_is_refused(library: Path, voting: int) -> None:
    with pytest.raises(Exception, match=f"window_lengths: expected 1..8, found {voting}"):
        native(library)(*inputs((100,)), np.array([voting]))
