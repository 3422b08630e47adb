"""The operators of Expected Attention alone: the queries to expect, and the compaction that reads them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.operators.compaction.expected_attention import COMPACT_EXPECTED_ATTENTION
from kvc_trt.operators.compaction.expected_queries import EXPECTED_QUERIES
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode, normal
from tests.rounding import assert_close

HEADS, SIZE, CAPACITY, PAGE = 4, 8, 60, 3
LENGTHS = (200, 61, 60, 41, 40, 39, 3, 1)


@lru_cache
def observer(budget, sinks) -> SingleNode:
    attributes = {"prompt_budget": budget, "sinks": sinks}
    return SingleNode(EXPECTED_QUERIES.body(Layout(HeadShape(None, None, 0))), attributes)


@lru_cache
def compactor(budget, sinks, dtype="float32") -> SingleNode:
    attributes = {"prompt_budget": budget, "capacity": CAPACITY, "sinks": sinks, "page_size": PAGE, "fp8_bounds": 0}
    return SingleNode(COMPACT_EXPECTED_ATTENTION.body(Layout(HeadShape(None, None, 0), dtype=dtype)), attributes)


def inputs(lengths, kv_heads=2, seed=0):
    """Plain queries, the averaged rotation, keys and values, with rubbish past the rows' ends."""
    batch, length = len(lengths), max(lengths)
    queries = normal(seed, batch, length, HEADS, SIZE) + normal(seed + 1, 1, 1, HEADS, SIZE)
    keys, values = (normal(seed + 2 + i, batch, kv_heads, length, SIZE) for i in range(2))
    for row, n in enumerate(lengths):
        queries[row, n:], keys[row, :, n:], values[row, :, n:] = 1e9, 1e9, np.nan
    angles = np.array(lengths)[:, None] * 0.3 ** np.arange(SIZE // 2)
    rotation = [(0.8 * function(angles)).astype(np.float32) for function in (np.cos, np.sin)]
    return queries, rotation, keys, values, np.array(lengths)


def expected(queries, rotation, keys, values, lengths, budget, sinks, dtype=torch.float64):
    q, k, v, cosine, sine = (torch.from_numpy(x).to(dtype) for x in (queries, keys, values, *rotation))
    n = torch.from_numpy(lengths)
    ahead = reference.expected_queries(q.transpose(1, 2), (cosine, sine), n, sinks=sinks)
    return ahead, reference.keep_expected(ahead, k, v, n, prompt_budget=budget, sinks=sinks)


def run(arrays, budget, sinks):
    queries, rotation, keys, values, lengths = arrays
    ahead = observer(budget, sinks)(queries, *rotation, lengths)
    return compactor(budget, sinks)(ahead["query_mean"], ahead["query_covariance"], keys, values, lengths)


@pytest.mark.parametrize("sinks", [0, 4])
def test_statistics_equal_the_reference(sinks):
    arrays = inputs(LENGTHS)
    found = observer(40, sinks)(arrays[0], *arrays[1], arrays[-1])
    exact, _ = expected(*arrays, 40, sinks)
    assert_close(found["query_mean"], exact.mean, 2e-6)
    assert_close(found["query_covariance"], exact.covariance, 2e-6)


def test_no_statistics_are_taken_of_prompts_that_fit():
    arrays = inputs((40, 7))
    found = observer(40, 4)(arrays[0], *arrays[1], arrays[-1])
    assert found["query_mean"].shape == (2, HEADS, SIZE)
    assert found["query_covariance"].shape == (2, HEADS, SIZE, SIZE)
    assert not found["query_mean"].any()
    assert not found["query_covariance"].any()


def check(arrays, budget, sinks, swaps=0):
    """Lists equal those of the exact reference; `swaps` of them may be those of the same rule in single precision."""
    *_, keys, values, lengths = arrays
    found = run(arrays, budget, sinks)
    _, double = expected(*arrays, budget, sinks)
    _, single = expected(*arrays, budget, sinks, torch.float32)
    width, differing = double.indices.shape[2], 0
    np.testing.assert_array_equal(found["cache_lengths"], double.lengths.numpy())
    assert (found["indices"][:, :, width:] == -1).all()
    for row in range(len(lengths)):
        if not np.array_equal(found["indices"][row, :, :width], double.indices[row].numpy()):
            np.testing.assert_array_equal(found["indices"][row, :, :width], single.indices[row].numpy())
            differing += 1
    assert differing <= swaps
    stored, rows = found["indices"][..., None] >= 0, np.maximum(found["indices"], 0)[..., None]
    for name, source in (("k_cache", keys), ("v_cache", values)):
        np.testing.assert_array_equal(found[name], np.where(stored, np.take_along_axis(source, rows, axis=2), 0))
    bounds = reference.page_bounds(torch.from_numpy(found["k_cache"]), torch.from_numpy(found["cache_lengths"]), PAGE)
    low, high = (bound.numpy().transpose(0, 1, 3, 2) for bound in bounds)
    both = np.concatenate([high, -low], axis=2)
    lowest = np.finfo(np.float32).min
    np.testing.assert_array_equal(found["bounds"], np.where(np.isinf(both), lowest, both))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("budget", "sinks"), [(40, 4), (40, 0), (5, 4), (60, 16)])
def test_unequal_rows_equal_the_reference(kv_heads, budget, sinks):
    check(inputs(LENGTHS, kv_heads), budget, sinks)


@pytest.mark.parametrize("lengths", [(200,), (1,), (40, 40), (41, 41), (5, 200, 40)])
def test_every_composition_of_a_batch_equals_the_reference(lengths):
    check(inputs(lengths, seed=7), 40, 4)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=3), st.sampled_from([16, 40]), st.integers(0, 5),
    st.integers(0, 10_000),
)  # fmt: skip
def test_random_prompts_equal_the_reference(lengths, budget, sinks, seed):
    check(inputs(lengths, seed=seed), budget, sinks, swaps=1)


def test_equal_scores_go_to_the_lowest():
    queries, rotation, keys, values, lengths = inputs((60,))
    keys[:], values[:] = 1, 1
    found = run((queries, rotation, keys, values, lengths), 10, 4)
    np.testing.assert_array_equal(found["indices"][0, :, :10], [[*range(10)]] * 2)


def test_half_precision_keeps_what_the_reference_keeps_of_the_same_values():
    queries, rotation, keys, values, lengths = inputs((150, 61, 3), seed=6)
    halves = [np.nan_to_num(x).clip(-9, 9).astype(np.float16) for x in (queries, keys, values)]
    widened = [half.astype(np.float32) for half in halves]
    ahead = observer(40, 4)(halves[0], *rotation, lengths)
    assert ahead["query_mean"].dtype == np.float32
    found = compactor(40, 4, "float16")(ahead["query_mean"], ahead["query_covariance"], *halves[1:], lengths)
    _, single = expected(widened[0], rotation, *widened[1:], lengths, 40, 4, torch.float32)
    np.testing.assert_array_equal(found["indices"][:, :, :40], single.indices.numpy())
    assert found["k_cache"].dtype == found["bounds"].dtype == np.float16
