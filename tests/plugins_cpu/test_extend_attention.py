"""KvcExtendAttention by the native library: exact attention for any shape, threads and processor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.operators.shapes import HeadShape, Layout
from kvc_trt.operators.turns.extend_attention import EXTEND_ATTENTION
from tests.graph.small_models import SingleNode, normal
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode
from tests.rounding import assert_close

BODY = EXTEND_ATTENTION.body(Layout(HeadShape(None, None, 0)))


def turn(
    stored: list[int], block: int, *, group: int = 2, kv_heads: int = 2, size: int = 32, spare: int = 0, seed: int = 0
) -> list[np.ndarray]:
    """Queries of a block, keys and values of a table with `spare` slots after its entries, and `stored`."""
    batch, entries = len(stored), max(stored) + block + spare
    tables = [normal(seed + part, batch, kv_heads, entries, size) for part in (1, 2)]
    return [normal(seed, batch, group * kv_heads, block, size), *tables, np.array(stored)]


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Return the reference's result in float64."""
    tensors = [torch.from_numpy(array.astype(np.float64)) for array in (q, k, v)]
    new = torch.full((len(stored),), q.shape[2])
    return reference.extend_attention(*tensors, torch.from_numpy(stored), new).numpy()


@pytest.mark.pairwise
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("stored", "block", "group", "size"),
    [([0], 1, 4, 64), ([63, 64, 65], 64, 1, 80), ([200, 0, 17], 130, 3, 20), ([500], 7, 5, 32), ([1, 129], 1, 2, 64)],
)
def test_native_results_equal_the_bodys(
    library: Path, instructions: str, threads: int, stored: list[int], block: int, group: int, size: int
) -> None:
    arrays = turn(stored, block, group=group, size=size, spare=3)
    found = NativeNode(BODY, {}, library, threads)(*arrays)["o"]
    assert_close(found, SingleNode(BODY, {})(*arrays)["o"], 2e-6)


@settings(max_examples=80)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=3),
    st.integers(1, 200),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.integers(1, 40),
    st.integers(0, 70),
    st.integers(0, 1000),
    ANY_INSTRUCTIONS,
)
def test_random_turns_equal_exact_attention(
    library: Path, stored: list[int], block: int, group: int, size: int, spare: int, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    arrays = turn(stored, block, group=group, size=size, spare=spare, seed=seed)
    assert_close(NativeNode(BODY, {}, library)(*arrays)["o"], exact(*arrays), 2e-6)


def test_padding_may_reach_beyond_the_table(library: Path, instructions: str) -> None:
    """A row that fills its table has no slots for the padding of its block: real queries do not notice."""
    q, k, v, stored = turn([100, 40], 60)
    found = NativeNode(BODY, {}, library)(q, k[:, :, :130], v[:, :, :130], stored)["o"]
    expected = exact(q, k, v, stored)
    assert_close(found[0, :, :30], expected[0, :, :30], 2e-6)
    assert_close(found[1], expected[1], 2e-6)


def test_later_tokens_do_not_change_earlier_ones(library: Path, instructions: str) -> None:
    q, k, v, stored = turn([150, 20], 70, spare=100)
    native = NativeNode(BODY, {}, library)
    before = native(q, k, v, stored)["o"]
    for row, count in enumerate(stored):
        k[row, :, count + 30 :] *= 7
        v[row, :, count + 30 :] += 3
    np.testing.assert_array_equal(native(q, k, v, stored)["o"][:, :, :30], before[:, :, :30])


def test_threads_do_not_change_a_bit(library: Path, instructions: str) -> None:
    arrays = turn([310, 64, 0], 150, group=3)
    one, two = (NativeNode(BODY, {}, library, threads)(*arrays)["o"] for threads in (1, 2))
    np.testing.assert_array_equal(one, two)


def test_nan_of_one_row_reaches_no_other(library: Path, instructions: str) -> None:
    arrays = turn([50, 70], 20)
    arrays[1][0, 0, 7, 3] = np.nan
    found = NativeNode(BODY, {}, library)(*arrays)["o"]
    assert np.isnan(found[0, :2]).all()
    assert not np.isnan(found[0, 2:]).any()
    assert not np.isnan(found[1]).any()


@pytest.mark.parametrize("stored", [-1, 90])
def test_lengths_outside_of_the_table_are_refused(library: Path, stored: int) -> None:
    q, k, v, _ = turn([80], 10)
    with pytest.raises(Exception, match=f"cache_lengths: expected 0..89, found {stored}"):
        NativeNode(BODY, {}, library)(q, k, v, np.array([stored]))
