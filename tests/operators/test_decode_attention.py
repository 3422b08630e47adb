"""KvcHybridAttention and KvcDenseAttention, step by step against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.kernels import reference_ops
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.dimensions import stored_pages
from kvc_trt.operators.shapes import LOWEST, HeadShape, Layout
from tests.graph.small_models import SingleNode, normal
from tests.near_ties import compare_selection
from tests.rounding import assert_close

HEADS, SIZE, CAPACITY = 8, 16, 64


@dataclass(frozen=True)
class Case:
    heads: int = HEADS
    page_size: int = 3
    top_r: int = 9
    top_k: int = 12
    token_budget: int = 16
    dense_until: int = 20
    kv_heads: int = 2
    dtype: str = "float32"
    fp8_bounds: bool = False
    recent: int = 0

    @property
    def pages(self):
        return stored_pages(CAPACITY, self.page_size, np.dtype(self.dtype).itemsize, self.fp8_bounds)

    @property
    def limit(self):
        return max(self.token_budget, self.dense_until)


@lru_cache
def hybrid(case: Case) -> SingleNode:
    return SingleNode(hybrid_body(case), attributes_of(case))


def hybrid_body(case: Case):
    layout = Layout(HeadShape(case.heads, case.kv_heads, SIZE), CAPACITY, case.pages, case.dtype, case.fp8_bounds)
    return HYBRID_ATTENTION.body(layout)


def attributes_of(case: Case) -> dict[str, int]:
    return {one.name: int(getattr(case, one.name)) for one in HYBRID_ATTENTION.attributes}


def bounds_of(case: Case, keys, lengths):
    """Return the reference's bounds of float32 keys, and the same as a cache of the case's type keeps them."""
    stored = torch.from_numpy(keys)
    extremes = reference.page_bounds(stored, torch.as_tensor(lengths), case.page_size, fp8=case.fp8_bounds)
    return extremes, reference_ops.channel_major(*extremes, stored.dtype, fp8=case.fp8_bounds).numpy()


@lru_cache
def dense(kv_heads=2, dense_until=20) -> SingleNode:
    return SingleNode(DENSE_ATTENTION.body(Layout(HeadShape(HEADS, kv_heads, SIZE))), {"dense_until": dense_until})


def cache(case: Case, lengths, *, seed=0, rounded=False):
    """k_cache, v_cache, bounds of rows with `lengths` entries."""
    keys, values = (normal(seed + i, len(lengths), case.kv_heads, CAPACITY, SIZE) for i in range(2))
    if rounded:
        keys = np.round(keys)
    empty = np.arange(CAPACITY)[None, None, :, None] >= np.array(lengths)[:, None, None, None]
    keys, values = (np.where(empty, np.float32(0), array) for array in (keys, values))
    return keys, values, bounds_of(case, keys, lengths)[1]


def new_entry(case: Case, batch, *, seed=0, rounded=False):
    arrays = (
        normal(seed + 9, batch, case.heads, SIZE),
        *(normal(seed + i, batch, case.kv_heads, SIZE) for i in (10, 11)),
    )
    return [np.round(array) for array in arrays] if rounded else list(arrays)


def check_step(case: Case, state, step, lengths, node: SingleNode | None = None):
    """One step from both, of `node` instead of the body if given; returns the new state."""
    query, k_new, v_new = step
    keys, values, bounds = state
    found = (node or hybrid(case))(query, k_new, v_new, keys, values, bounds, np.array(lengths))
    after = np.array(lengths) + 1
    for name, old, new in (("k_cache_out", keys, k_new), ("v_cache_out", values, v_new)):
        expected = old.copy()
        expected[np.arange(len(lengths)), :, lengths] = new
        np.testing.assert_array_equal(found[name], expected)
    stored = torch.from_numpy(found["k_cache_out"])
    (low, high), exact = bounds_of(case, found["k_cache_out"], after)
    np.testing.assert_array_equal(found["bounds_out"], exact)
    output, selected = reference.hybrid_attention(
        torch.from_numpy(query), stored, torch.from_numpy(found["v_cache_out"]), torch.from_numpy(after), low, high,
        page_size=case.page_size, top_r=case.top_r, top_k=case.top_k, token_budget=case.token_budget,
        dense_until=case.dense_until, force_recent=case.recent,
    )  # fmt: skip
    assert found["selected"].dtype == np.int32
    assert found["selected"].shape == (len(lengths), case.kv_heads, max(case.top_k, case.limit))
    comparison = compare_selection(
        query, found["k_cache_out"], after, selected.numpy(), found["selected"],
        page_size=case.page_size, top_r=case.top_r, fp8_bounds=case.fp8_bounds, recent=case.recent,
    )  # fmt: skip
    assert not comparison.wrong
    if not comparison.near_ties:
        np.testing.assert_array_equal(found["selected"], selected.numpy())
        assert_close(found["output"], output, 2e-6)
    return found["k_cache_out"], found["v_cache_out"], found["bounds_out"]


@pytest.mark.pairwise
@pytest.mark.parametrize("fp8_bounds", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 7])
def test_rows_of_every_length_follow_the_reference_step_by_step(page_size, kv_heads, fp8_bounds):
    case = Case(page_size=page_size, kv_heads=kv_heads, fp8_bounds=fp8_bounds)
    lengths = [0, 1, 11, 12, 15, 16, 19, 20, 21, 40, 58]
    state = cache(case, lengths)
    for step in range(5):
        state = check_step(case, state, new_entry(case, len(lengths), seed=100 * step), lengths)
        lengths = [length + 1 for length in lengths]


RECENT = (
    Case(recent=1),
    Case(page_size=5, recent=7),
    Case(page_size=1, top_k=5, recent=5),
    Case(page_size=4, top_k=9, token_budget=2, dense_until=0, recent=8),
)
"""Steps that read the last tokens in any case: within a page, across pages, and nothing else."""


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=4),
    st.sampled_from(
        [Case(), Case(page_size=1, top_r=16), Case(page_size=5, top_r=1, kv_heads=8), Case(top_k=20), *RECENT]
    ),
    st.integers(0, 10_000),
    st.booleans(),
    st.booleans(),
)
def test_any_batch_selects_what_the_reference_selects(lengths, case, seed, rounded, fp8_bounds):
    case = replace(case, fp8_bounds=fp8_bounds)
    state = cache(case, lengths, seed=seed, rounded=rounded)
    check_step(case, state, new_entry(case, len(lengths), seed=seed, rounded=rounded), lengths)


@pytest.mark.parametrize("case", RECENT)
def test_last_tokens_are_read_in_any_case_within_top_k(case):
    """Keys that score low stay in the list, and the others get the places that are left."""
    lengths = np.array([40, 63])
    query, k_new, v_new = new_entry(case, 2)
    keys, values, _ = cache(case, lengths)
    query, keys = np.abs(query), np.where(np.arange(CAPACITY)[:, None] >= 30, -np.abs(keys), keys)
    state = keys, values, bounds_of(case, keys, lengths)[1]
    found = hybrid(case)(query, -np.abs(k_new), v_new, *state, lengths)["selected"]
    for row, m in zip(found, lengths + 1, strict=True):
        read = row[:, : case.top_k]
        assert (read >= 0).all()
        assert (row[:, case.top_k :] == -1).all()
        np.testing.assert_array_equal(read[:, case.top_k - case.recent :], [range(m - case.recent, m)] * case.kv_heads)
        assert (np.diff(read) > 0).all()


def test_the_last_slot_can_be_filled():
    case = Case(page_size=5)
    check_step(case, cache(case, [CAPACITY - 1]), new_entry(case, 1), [CAPACITY - 1])


def test_all_zero_queries_read_the_lowest_tokens():
    """Every page ties, the partial last one included: the lowest indices win."""
    case = Case()
    query, k_new, v_new = new_entry(case, 2)
    query[:] = 0
    found = hybrid(case)(query, k_new, v_new, *cache(case, [40, 61]), np.array([40, 61]))
    np.testing.assert_array_equal(found["selected"][:, :, :12], np.broadcast_to(np.arange(12), (2, 2, 12)))


def test_nan_queries_still_select_valid_slots():
    case = Case()
    query, k_new, v_new = new_entry(case, 1)
    query[0, 0] = np.nan
    found = hybrid(case)(query, k_new, v_new, *cache(case, [40]), np.array([40]))
    np.testing.assert_array_equal(found["selected"][0, 0, :12], np.arange(12))


@pytest.mark.parametrize("lengths", [[0], [5, 19], [19, 19], [3, 18, 7]])
def test_rows_that_fit_are_bit_identical_to_dense(lengths):
    """A dense engine has another capacity: the slice, not the cache, decides the result."""
    case, lengths = Case(), np.array(lengths)
    keys, values, bounds = cache(case, lengths)
    step = new_entry(case, len(lengths))
    sparse = hybrid(case)(*step, keys, values, bounds, lengths)["output"]
    wider = [np.pad(array, ((0, 0), (0, 0), (0, 200), (0, 0))) for array in (keys, values)]
    np.testing.assert_array_equal(sparse, dense()(*step, *wider, lengths)["output"])


def test_a_batch_with_one_long_row_is_dense_to_rounding_where_rows_fit():
    case, lengths = Case(), np.array([10, 60])
    keys, values, bounds = cache(case, lengths)
    step = new_entry(case, 2)
    sparse = hybrid(case)(*step, keys, values, bounds, lengths)["output"]
    exact = dense()(*step, keys, values, lengths)["output"]
    assert_close(sparse[0], exact[0], 2e-6)
    assert np.abs(sparse[1] - exact[1]).max() > 1e-3


@pytest.mark.parametrize("dense_until", [0, 20, CAPACITY])
@pytest.mark.parametrize("lengths", [[0, 3], [19, 30], [31, 32], [63, 1]])
def test_dense_attention_equals_the_reference_sliced_or_in_place(lengths, dense_until):
    case, lengths = Case(), np.array(lengths)
    keys, values, _ = cache(case, lengths)
    query, k_new, v_new = new_entry(case, 2)
    found = dense(2, dense_until)(query, k_new, v_new, keys, values, lengths)
    tensors = (torch.from_numpy(a) for a in (query, found["k_cache_out"], found["v_cache_out"], lengths + 1))
    assert_close(found["output"], reference.dense_attention(*tensors), 2e-6)


@pytest.mark.parametrize("poison", [LOWEST["float16"], np.nan, np.inf, 6e4])
@pytest.mark.parametrize("page_size", [3, 4, 5, 7, 8, 9, 10, 64])
def test_half_precision_caches_select_the_same_tokens(page_size, poison):
    """Tries 1 to 22 pages. Pages past the last slot take no part, whatever their bounds are."""
    case, exact = Case(dtype="float16", page_size=page_size), Case(page_size=page_size)
    lengths = [10, 45, 62]
    keys, values, bounds = (np.maximum(array, LOWEST["float16"]).astype(np.float16) for array in cache(exact, lengths))
    step = [array.astype(np.float16) for array in new_entry(case, 3)]
    more = (0, case.pages - exact.pages)
    stored = np.pad(bounds, ((0, 0), (0, 0), (0, 0), more), constant_values=np.float16(poison))
    found = hybrid(case)(*step, keys, values, stored, np.array(lengths))
    assert found["output"].dtype == found["bounds_out"].dtype == np.float16
    widened = [array.astype(np.float32) for array in (*step, keys, values)]
    expected = hybrid(exact)(*widened, bounds.astype(np.float32), np.array(lengths))
    np.testing.assert_array_equal(found["selected"], expected["selected"])
    np.testing.assert_allclose(found["output"], expected["output"], atol=2e-3)
    tensors = [torch.from_numpy(array.copy()) for array in (*step, keys, values, stored, np.array(lengths))]
    _, selected = reference_ops.hybrid_attention(*tensors, reference_ops.StepNumbers(**attributes_of(case)))
    np.testing.assert_array_equal(found["selected"], selected.numpy())


@pytest.mark.parametrize("page_size", [1, 3, 8, 64])
def test_half_precision_caches_with_fp8_bounds_select_the_same_tokens(page_size):
    """Pages past the last slot take no part."""
    case, exact = (
        Case(dtype="float16", page_size=page_size, fp8_bounds=True),
        Case(page_size=page_size, fp8_bounds=True),
    )
    lengths = [10, 45, 62]
    halves = [array.astype(np.float16) for array in cache(exact, lengths)[:2]]
    step = [array.astype(np.float16) for array in new_entry(case, 3)]
    _, bounds = bounds_of(exact, halves[0].astype(np.float32), lengths)
    widened = [array.astype(np.float32) for array in (*step, *halves)]
    expected = hybrid(exact)(*widened, bounds, np.array(lengths))
    stored = np.pad(bounds, ((0, 0), (0, 0), (0, 0), (0, case.pages - bounds.shape[3])), constant_values=np.int8(123))
    found = hybrid(case)(*step, *halves, stored, np.array(lengths))
    assert (found["output"].dtype, found["bounds_out"].dtype) == (np.float16, np.int8)
    np.testing.assert_array_equal(found["selected"], expected["selected"])
    np.testing.assert_array_equal(found["bounds_out"][..., : bounds.shape[3]], expected["bounds_out"])
    tensors = [torch.from_numpy(array.copy()) for array in (*step, *halves, stored, np.array(lengths))]
    _, selected = reference_ops.hybrid_attention(*tensors, reference_ops.StepNumbers(**attributes_of(case)))
    np.testing.assert_array_equal(found["selected"], selected.numpy())
