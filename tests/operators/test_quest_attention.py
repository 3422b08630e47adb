"""KvcQuestAttention, step by step against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.kernels import reference_ops
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.quest_attention import QUEST_ATTENTION
from kvc_trt.operators.dimensions import stored_pages
from kvc_trt.operators.shapes import LOWEST, HeadShape, Layout
from tests.graph.small_models import SingleNode, normal

HEADS, SIZE, CAPACITY = 8, 16, 64


@dataclass(frozen=True)
class Case:
    page_size: int = 5
    top_k: int = 15
    token_budget: int = 16
    dense_until: int = 20
    kv_heads: int = 2
    dtype: str = "float32"
    fp8_bounds: bool = False

    @property
    def width(self):
        return max(self.top_k, self.token_budget, self.dense_until)


@lru_cache
def quest(case: Case) -> SingleNode:
    attributes = {one.name: int(getattr(case, one.name)) for one in QUEST_ATTENTION.attributes}
    pages = stored_pages(CAPACITY, case.page_size, np.dtype(case.dtype).itemsize, case.fp8_bounds)
    layout = Layout(HeadShape(HEADS, case.kv_heads, SIZE), CAPACITY, pages, case.dtype, case.fp8_bounds)
    return SingleNode(QUEST_ATTENTION.body(layout), attributes)


def bounds_of(case: Case, keys, lengths):
    stored = torch.from_numpy(keys)
    extremes = reference.page_bounds(stored, torch.tensor(lengths), case.page_size, fp8=case.fp8_bounds)
    return reference_ops.channel_major(*extremes, stored.dtype, fp8=case.fp8_bounds).numpy()


def inputs(case: Case, lengths, *, seed=0, rounded=False):
    """query, k_new, v_new, k_cache, v_cache, bounds of rows with `lengths` entries; rounded numbers make ties."""
    batch, kv_heads = len(lengths), case.kv_heads
    shapes = [(HEADS, SIZE), (kv_heads, SIZE), (kv_heads, SIZE), (kv_heads, CAPACITY, SIZE), (kv_heads, CAPACITY, SIZE)]
    arrays = [normal(seed + i, batch, *shape) for i, shape in enumerate(shapes)]
    arrays = [np.round(array) for array in arrays] if rounded else arrays
    empty = np.arange(CAPACITY)[None, None, :, None] >= np.array(lengths)[:, None, None, None]
    arrays[3:] = [np.where(empty, np.float32(0), array) for array in arrays[3:]]
    return [*arrays, bounds_of(case, arrays[3], lengths)]


def check_step(case: Case, arrays, lengths):
    """One step from both; returns the new state."""
    query, k_new, v_new, keys, values, _ = arrays
    found = quest(case)(*arrays, np.array(lengths))
    after = [length + 1 for length in lengths]
    for name, old, new in (("k_cache_out", keys, k_new), ("v_cache_out", values, v_new)):
        expected = old.copy()
        expected[np.arange(len(lengths)), :, lengths] = new
        np.testing.assert_array_equal(found[name], expected)
    stored, held = torch.from_numpy(found["k_cache_out"]), torch.from_numpy(found["v_cache_out"])
    np.testing.assert_array_equal(found["bounds_out"], bounds_of(case, found["k_cache_out"], after))
    counts = torch.tensor(after)
    extremes = reference.page_bounds(stored, counts, case.page_size, fp8=case.fp8_bounds)
    output, selected = reference.quest_attention(
        torch.from_numpy(query), stored, held, counts, *extremes,
        page_size=case.page_size, top_k=case.top_k, token_budget=case.token_budget, dense_until=case.dense_until,
    )  # fmt: skip
    assert found["selected"].dtype == np.int32
    assert found["selected"].shape == (len(lengths), HEADS, case.width)
    np.testing.assert_array_equal(found["selected"], selected.numpy())
    np.testing.assert_allclose(found["output"], output.numpy(), atol=1e-5)
    return [found["k_cache_out"], found["v_cache_out"], found["bounds_out"]]


@pytest.mark.pairwise
@pytest.mark.parametrize("fp8_bounds", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("page_size", [1, 3, 5])
def test_rows_of_every_length_follow_the_reference_step_by_step(page_size, kv_heads, fp8_bounds):
    case = Case(page_size=page_size, kv_heads=kv_heads, fp8_bounds=fp8_bounds)
    lengths = [0, 1, 14, 15, 16, 19, 20, 21, 40, 58]
    state = inputs(case, lengths)[3:]
    for step in range(5):
        state = check_step(case, [*inputs(case, lengths, seed=100 * step)[:3], *state], lengths)
        lengths = [length + 1 for length in lengths]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=4),
    st.sampled_from([Case(), Case(page_size=1, top_k=1), Case(page_size=7, top_k=21, dense_until=0, kv_heads=8)]),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_any_batch_selects_what_the_reference_selects(lengths, case, seed, rounded):
    check_step(case, inputs(case, lengths, seed=seed, rounded=rounded), lengths)


def test_query_heads_of_one_group_choose_for_themselves():
    found = quest(Case())(*inputs(Case(), [60]), np.array([60]))["selected"][0]
    assert (found[0] != found[1]).any()
    assert (found >= 60).any(axis=-1).all()  # the newest token is read by every head


def test_all_zero_queries_read_the_lowest_pages_and_the_newest():
    case, lengths = Case(), np.array([41, 63])
    query, *rest = inputs(case, lengths)
    found = quest(case)(np.zeros_like(query), *rest, lengths)["selected"]
    assert found[0, 3, :13].tolist() == [*range(10), 40, 41, -1]
    assert found[1, 7, :15].tolist() == [*range(10), 60, 61, 62, 63, -1]


def test_nan_queries_and_nan_pages_rank_last():
    case, arrays = Case(), inputs(Case(), [40])
    arrays[0][0, 0, 5] = np.nan
    arrays[3][0, 1, 3] = np.nan
    arrays[5] = bounds_of(case, arrays[3], [40])
    found = quest(case)(*arrays, np.array([40]))
    assert found["selected"][0, 0, :12].tolist() == [*range(10), 40, -1]
    assert (found["selected"][0, 4:, 0] >= 5).all()
    assert not np.isnan(found["output"][0, 1:]).any()


@pytest.mark.parametrize("lengths", [[0], [5, 19], [3, 18, 7]])
def test_rows_that_fit_are_bit_identical_to_dense(lengths):
    *arrays, bounds = inputs(Case(), lengths)
    sparse = quest(Case())(*arrays, bounds, np.array(lengths))["output"]
    wider = [*arrays[:3], *(np.pad(array, ((0, 0), (0, 0), (0, 200), (0, 0))) for array in arrays[3:])]
    dense = SingleNode(DENSE_ATTENTION.body(Layout(HeadShape(HEADS, 2, SIZE))), {"dense_until": 20})
    np.testing.assert_array_equal(sparse, dense(*wider, np.array(lengths))["output"])


@pytest.mark.parametrize("poison", [LOWEST["float16"], np.nan, 6e4])
def test_half_precision_caches_select_the_same_tokens(poison):
    """The pages past the last slot take no part, whatever their bounds are."""
    case, lengths = Case(dtype="float16"), np.array([10, 45, 62])
    arrays = [np.maximum(array, LOWEST["float16"]).astype(np.float16) for array in inputs(case, lengths)]
    more = stored_pages(CAPACITY, case.page_size, 2, 0) - arrays[5].shape[3]
    assert more == 3
    padding = ((0, 0), (0, 0), (0, 0), (0, more))
    found = quest(case)(*arrays[:5], np.pad(arrays[5], padding, constant_values=np.float16(poison)), lengths)
    assert found["output"].dtype == found["bounds_out"].dtype == np.float16
    expected = quest(Case())(*(array.astype(np.float32) for array in arrays), lengths)
    np.testing.assert_array_equal(found["selected"], expected["selected"])
    np.testing.assert_allclose(found["output"], expected["output"], atol=2e-3)
