"""KvcSparqAttention, step by step against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.sparq_attention import SPARQ_ATTENTION
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode, normal
from tests.rounding import assert_close

HEADS, SIZE, CAPACITY = 8, 16, 64


@dataclass(frozen=True)
class Case:
    top_r: int = 5
    top_k: int = 12
    token_budget: int = 16
    dense_until: int = 20
    kv_heads: int = 2
    dtype: str = "float32"
    reallocate: bool = True

    @property
    def attributes(self):
        return {name: getattr(self, name) for name in ("top_r", "top_k", "token_budget", "dense_until")}


@lru_cache
def sparq(case: Case) -> SingleNode:
    layout = Layout(
        HeadShape(HEADS, case.kv_heads, SIZE), CAPACITY, None, case.dtype, numbers={"reallocate": case.reallocate}
    )
    return SingleNode(SPARQ_ATTENTION.body(layout), case.attributes)


def inputs(case: Case, lengths, *, seed=0, rounded=False):
    """query, k_new, v_new, k_cache, v_cache, channels, value_sum of rows with `lengths` entries."""
    batch, kv_heads = len(lengths), case.kv_heads
    shapes = [(HEADS, SIZE), (kv_heads, SIZE), (kv_heads, SIZE), (kv_heads, CAPACITY, SIZE), (kv_heads, CAPACITY, SIZE)]
    arrays = [normal(seed + i, batch, *shape) for i, shape in enumerate(shapes)]
    arrays = [np.round(array) for array in arrays] if rounded else arrays
    empty = np.arange(CAPACITY)[None, None, :, None] >= np.array(lengths)[:, None, None, None]
    keys, values = (np.where(empty, np.float32(0), array) for array in arrays[3:])
    return [*arrays[:3], keys, values, np.ascontiguousarray(keys.transpose(0, 1, 3, 2)), values.sum(axis=2)]


def check_step(case: Case, arrays, lengths):
    """One step from both; returns the new state."""
    query, k_new, v_new, keys, values, *_ = arrays
    found = sparq(case)(*arrays, np.array(lengths))
    for name, old, new in (("k_cache_out", keys, k_new), ("v_cache_out", values, v_new)):
        expected = old.copy()
        expected[np.arange(len(lengths)), :, lengths] = new
        np.testing.assert_array_equal(found[name], expected)
    np.testing.assert_array_equal(found["channels_out"], found["k_cache_out"].transpose(0, 1, 3, 2))
    assert_close(found["value_sum_out"], found["v_cache_out"].sum(axis=2))
    state = [found[name] for name in ("k_cache_out", "v_cache_out", "channels_out", "value_sum_out")]
    output, selected = reference.sparq_attention(
        torch.from_numpy(query), *(torch.from_numpy(array) for array in state[:2]), torch.tensor(lengths) + 1,
        **case.attributes, reallocate=case.reallocate,
    )  # fmt: skip
    assert found["selected"].dtype == np.int32
    assert found["selected"].shape == (len(lengths), case.kv_heads, max(case.top_k + 1, 16, case.dense_until))
    np.testing.assert_array_equal(found["selected"], selected.numpy())
    assert_close(found["output"], output)
    return state


@pytest.mark.parametrize("reallocate", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_rows_of_every_length_follow_the_reference_step_by_step(kv_heads, reallocate):
    case, lengths = Case(kv_heads=kv_heads, reallocate=reallocate), [0, 1, 11, 12, 13, 15, 16, 19, 20, 21, 40, 58]
    state = inputs(case, lengths)[3:]
    for step in range(5):
        state = check_step(case, [*inputs(case, lengths, seed=100 * step)[:3], *state], lengths)
        lengths = [length + 1 for length in lengths]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=4),
    st.sampled_from([Case(), Case(top_r=16, top_k=1), Case(top_r=1, top_k=30, dense_until=0, kv_heads=8)]),
    st.integers(0, 10_000),
)
def test_any_batch_selects_what_the_reference_selects(lengths, case, seed):
    check_step(case, inputs(case, lengths, seed=seed), lengths)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=4), st.integers(0, 10_000))
def test_ties_go_to_the_lower_token(lengths, seed):
    """Rounded keys make columns of equal scores, all of them exact for one head; sums over heads round alike."""
    case = Case(top_r=2, kv_heads=8)
    check_step(case, inputs(case, lengths, seed=seed, rounded=True), lengths)


def test_equal_keys_tie_in_a_group_too():
    case, arrays = Case(kv_heads=1), inputs(Case(kv_heads=1), [60])
    arrays[3][:, :, :60] = arrays[3][:, :, :1]
    arrays[5] = np.ascontiguousarray(arrays[3].transpose(0, 1, 3, 2))
    found = sparq(case)(*arrays, np.array([60]))["selected"][0, 0]
    assert found[:14].tolist() == [*range(12), 60, -1]


def test_all_zero_queries_read_the_lowest_tokens_and_the_current_one():
    query, *rest = inputs(Case(), [40, 63])
    found = sparq(Case())(np.zeros_like(query), *rest, np.array([40, 63]))["selected"]
    assert found[0, 1, :14].tolist() == [*range(12), 40, -1]
    assert found[1, 0, :14].tolist() == [*range(12), 63, -1]


def test_nan_ranks_last():
    arrays = inputs(Case(), [40])
    arrays[0][0, 0, 5] = np.nan
    arrays[5][0, 1, :, 3] = np.nan
    found = sparq(Case())(*arrays, np.array([40]))["selected"][0]
    assert found[0, :14].tolist() == [*range(12), 40, -1]
    assert 3 not in found[1]


@pytest.mark.parametrize("lengths", [[0], [5, 19], [3, 18, 7]])
def test_rows_that_fit_are_bit_identical_to_dense(lengths):
    *arrays, channels, value_sum = inputs(Case(), lengths)
    sparse = sparq(Case())(*arrays, channels, value_sum, np.array(lengths))["output"]
    wider = [*arrays[:3], *(np.pad(array, ((0, 0), (0, 0), (0, 200), (0, 0))) for array in arrays[3:])]
    dense = SingleNode(DENSE_ATTENTION.body(Layout(HeadShape(HEADS, 2, SIZE))), {"dense_until": 20})
    np.testing.assert_array_equal(sparse, dense(*wider, np.array(lengths))["output"])


def test_half_precision_caches_select_the_same_tokens():
    case, lengths = Case(dtype="float16"), np.array([10, 45, 62])
    *arrays, value_sum = inputs(case, lengths)
    arrays = [array.astype(np.float16) for array in arrays]
    found = sparq(case)(*arrays, value_sum, lengths)
    assert found["output"].dtype == found["channels_out"].dtype == np.float16
    assert found["value_sum_out"].dtype == np.float32
    expected = sparq(Case())(*(array.astype(np.float32) for array in arrays), value_sum, lengths)
    np.testing.assert_array_equal(found["selected"], expected["selected"])
    np.testing.assert_allclose(found["output"], expected["output"], atol=2e-3)
