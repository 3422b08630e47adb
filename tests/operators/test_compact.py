from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.kernels import reference_ops
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode, normal
from tests.near_ties import compare_compaction

HEADS, SIZE, CAPACITY, PAGE = 4, 8, 60, 3
LENGTHS = (200, 61, 60, 59, 41, 40, 39, 9, 8, 7, 1)


@lru_cache
def body_of(pool_kernel=5, budget=40, dtype="float32", capacity=CAPACITY, fp8_bounds=0):
    layout = Layout(
        HeadShape(None, None, 0), dtype=dtype, fp8_bounds=bool(fp8_bounds), numbers={"pool_kernel": pool_kernel}
    )
    attributes = {"prompt_budget": budget, "capacity": capacity, "pool_kernel": pool_kernel, "page_size": PAGE}
    attributes |= {"fp8_bounds": fp8_bounds}
    return SingleNode(COMPACT.body(layout), attributes)


def inputs(lengths, *, kv_heads=2, window=8, rounded=False, seed=0):
    batch, length = len(lengths), max(lengths)
    arrays = [
        normal(seed, batch, HEADS, window, SIZE),
        normal(seed + 1, batch, kv_heads, length, SIZE),
        normal(seed + 2, batch, kv_heads, length, SIZE),
    ]
    if rounded:
        arrays = [np.round(array) for array in arrays]
    return [*arrays, np.array(lengths)]


def expected_from(query, keys, values, lengths, budget, kernel):
    tensors = [torch.from_numpy(array) for array in (query, keys, values, lengths)]
    return reference.compact(*tensors, prompt_budget=budget, pool_kernel=kernel)


def check(arrays, budget=40, kernel=5, compactor=None):
    """Hold the result of the body, or of another `compactor`, to the reference's."""
    query, keys, values, lengths = arrays
    found = (compactor or body_of(kernel, budget))(*arrays)
    expected = expected_from(*arrays, budget, kernel)
    kept = expected.indices.shape[2]
    comparison = compare_compaction(
        query, keys, lengths, expected.indices.numpy(), found["indices"][:, :, :kept], pool_kernel=kernel
    )
    assert not comparison.wrong
    assert (found["indices"][:, :, kept:] == -1).all()
    np.testing.assert_array_equal(found["cache_lengths"], np.minimum(lengths, budget))
    rows = np.maximum(found["indices"], 0)[..., None]
    stored = found["indices"][..., None] >= 0
    for name, source in (("k_cache", keys), ("v_cache", values)):
        np.testing.assert_array_equal(found[name], np.where(stored, np.take_along_axis(source, rows, axis=2), 0))
    check_bounds(found)
    return comparison


def check_bounds(found):
    cache, lengths = torch.from_numpy(found["k_cache"]), torch.from_numpy(found["cache_lengths"])
    fp8 = found["bounds"].dtype == np.int8
    extremes = reference.page_bounds(cache.float(), lengths, PAGE, fp8=fp8)
    expected = reference_ops.channel_major(*extremes, cache.dtype, fp8=fp8).numpy()
    np.testing.assert_array_equal(found["bounds"], expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kernel", [1, 5, 63, 511])
def test_unequal_rows_equal_the_reference(kv_heads, kernel):
    check(inputs(LENGTHS, kv_heads=kv_heads), kernel=kernel)


@pytest.mark.parametrize("lengths", [(200,), (8,), (1,), (40, 40), (41, 41), (5, 200, 40)])
def test_every_composition_of_a_batch_equals_the_reference(lengths):
    check(inputs(lengths, seed=7))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=4),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([16, 40]),
    st.integers(0, 10_000),
)
def test_scores_with_many_ties_choose_what_the_reference_chooses(lengths, kernel, budget, seed):
    """Rounded inputs repeat whole rows of scores, so that the tie rule decides."""
    check(inputs(lengths, rounded=True, seed=seed), budget, kernel)


def test_a_constant_prompt_keeps_its_beginning_and_its_window():
    arrays = inputs((100,), seed=1)
    arrays[1][:] = 1.0
    found = body_of()(*arrays)["indices"][0, 0, :40]
    np.testing.assert_array_equal(found, [*range(32), *range(92, 100)])


def test_padding_is_never_seen():
    arrays = inputs((150, 60), seed=3)
    clean = body_of()(*arrays)
    arrays[1][1, :, 60:], arrays[2][1, :, 60:] = 1e30, np.nan
    dirty = body_of()(*arrays)
    for name, value in clean.items():
        np.testing.assert_array_equal(dirty[name], value)


def test_a_prompt_of_any_padded_length_fits_the_capacity():
    """Prompts that fit are copied, whether their padding ends before or after the last slot."""
    for padded in (16, CAPACITY, 128):
        arrays = inputs((9, 16), seed=4)
        for i in (1, 2):
            arrays[i] = np.pad(arrays[i], ((0, 0), (0, 0), (0, padded - 16), (0, 0)), constant_values=5)
        found = body_of()(*arrays)
        assert found["k_cache"].shape == (2, 2, CAPACITY, SIZE)
        np.testing.assert_array_equal(found["k_cache"][1, :, :16], arrays[1][1, :, :16])
        assert not found["k_cache"][0, :, 9:].any()
        check_bounds(found)


def test_nan_queries_rank_below_every_number():
    arrays = inputs((100,), seed=5)
    arrays[0][0, 0] = np.nan  # one head of the first group: all its scores become NaN
    found = body_of()(*arrays)
    np.testing.assert_array_equal(
        found["indices"], np.pad(expected_from(*arrays, 40, 5).indices, ((0, 0), (0, 0), (0, 20)), constant_values=-1)
    )


def test_half_precision_keeps_what_the_reference_keeps_of_the_same_values():
    arrays = [array.astype(np.float16) if array.dtype == np.float32 else array for array in inputs(LENGTHS, seed=6)]
    found = body_of(dtype="float16")(*arrays)
    exact = [array.astype(np.float32) for array in arrays[:3]]
    expected = expected_from(*exact, arrays[3], 40, 5)
    comparison = compare_compaction(
        exact[0], exact[1], arrays[3], expected.indices.numpy(), found["indices"][:, :, :40], pool_kernel=5
    )
    assert not comparison.wrong
    assert found["k_cache"].dtype == found["bounds"].dtype == np.float16
    assert found["bounds"].shape[3] == 24
    check_bounds(found)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_fp8_bounds_are_the_references_and_nothing_else_depends_on_them(dtype):
    arrays = inputs(LENGTHS, seed=6)
    arrays[1][0, 0, -1, 0] = np.nan
    arrays[1][1, 0, -1, :2] = 6e4, -6e4
    arrays = [array.astype(dtype) if array.dtype == np.float32 else array for array in arrays]
    found, plain = (body_of(dtype=dtype, fp8_bounds=fp8)(*arrays) for fp8 in (1, 0))
    assert (found["bounds"].dtype, found["bounds"].shape[3]) == (np.int8, 32)
    check_bounds(found)
    for name in ("k_cache", "v_cache", "cache_lengths", "indices"):
        np.testing.assert_array_equal(found[name], plain[name])
