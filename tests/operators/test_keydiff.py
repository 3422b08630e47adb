"""KeyDiff's compaction alone, against the reference."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.operators.compaction.keydiff import COMPACT_KEYDIFF
from kvc_trt.operators.shapes import HeadShape, Layout
from kvc_trt.reference.methods.keydiff import distinctness
from tests.graph.small_models import SingleNode, normal

SIZE, CAPACITY, PAGE = 8, 60, 3
LENGTHS = (200, 61, 60, 41, 40, 39, 1)


@lru_cache
def compactor(budget=40, dtype="float32") -> SingleNode:
    attributes = {"prompt_budget": budget, "capacity": CAPACITY, "page_size": PAGE, "fp8_bounds": 0}
    return SingleNode(COMPACT_KEYDIFF.body(Layout(HeadShape(None, None, 0), dtype=dtype)), attributes)


def inputs(lengths, kv_heads=2, seed=0):
    """Prompts with rubbish past their ends."""
    keys, values = (normal(seed + i, len(lengths), kv_heads, max(lengths), SIZE) for i in range(2))
    for row, n in enumerate(lengths):
        keys[row, :, n:], values[row, :, n:] = 1e9, np.nan
    return keys, values, np.array(lengths)


def check(found, keys, values, lengths, budget, swaps=0):
    """Cache, bounds and indices; `swaps` lists may differ, by tokens whose exact scores are equal to rounding."""
    double = reference.keep_distinct(
        torch.from_numpy(keys).double(), torch.from_numpy(values).double(), torch.from_numpy(lengths),
        prompt_budget=budget,
    )  # fmt: skip
    width, differing = double.indices.shape[2], 0
    np.testing.assert_array_equal(found["cache_lengths"], double.lengths.numpy())
    assert (found["indices"][:, :, width:] == -1).all()
    for row, head in np.ndindex(*keys.shape[:2]):
        ours, theirs = set(found["indices"][row, head].tolist()), set(double.indices[row, head].tolist())
        if ours - {-1} != theirs - {-1}:
            exact = distinctness(torch.from_numpy(keys[row, head, None, : lengths[row]]).double())[0]
            parted = exact[list(ours ^ theirs)]
            assert parted.max() - parted.min() < 2**-20
            differing += 1
    assert differing <= swaps
    stored = found["indices"][..., None] >= 0
    rows = np.maximum(found["indices"], 0)[..., None]
    for name, source in (("k_cache", keys), ("v_cache", values)):
        np.testing.assert_array_equal(found[name], np.where(stored, np.take_along_axis(source, rows, axis=2), 0))
    bounds = reference.page_bounds(torch.from_numpy(found["k_cache"]), torch.from_numpy(found["cache_lengths"]), PAGE)
    low, high = (bound.numpy().transpose(0, 1, 3, 2) for bound in bounds)
    both = np.concatenate([high, -low], axis=2)
    lowest = np.finfo(np.float32).min
    np.testing.assert_array_equal(found["bounds"], np.where(np.isinf(both), lowest, both))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("budget", [1, 16, 40, 60])
def test_unequal_rows_equal_the_reference(kv_heads, budget):
    arrays = inputs(LENGTHS, kv_heads)
    check(compactor(budget)(*arrays), *arrays, budget)


@pytest.mark.parametrize("lengths", [(200,), (1,), (40, 40), (41, 41), (5, 200, 40)])
def test_every_composition_of_a_batch_equals_the_reference(lengths):
    arrays = inputs(lengths, seed=7)
    check(compactor()(*arrays), *arrays, 40)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=3), st.sampled_from([16, 40]), st.integers(0, 10_000))
def test_random_prompts_equal_the_reference(lengths, budget, seed):
    arrays = inputs(lengths, seed=seed)
    check(compactor(budget)(*arrays), *arrays, budget, swaps=1)


def test_the_lowest_of_equal_keys_stays_and_zero_keys_have_no_direction():
    keys = np.ones((1, 1, 60, SIZE), np.float32)
    keys[0, 0, 30] = 0
    found = compactor(10)(keys, keys, np.array([60]))
    np.testing.assert_array_equal(found["indices"][0, 0, :10], [*range(9), 30])


def test_half_precision_keeps_what_the_reference_keeps_of_the_same_values():
    keys, values, lengths = inputs((150, 61, 3), seed=6)
    halves = [np.nan_to_num(array, posinf=0).clip(-9, 9).astype(np.float16) for array in (keys, values)]
    found = compactor(dtype="float16")(*halves, lengths)
    expected = reference.keep_distinct(
        *(torch.from_numpy(half.astype(np.float32)) for half in halves), torch.from_numpy(lengths), prompt_budget=40
    )
    np.testing.assert_array_equal(found["indices"][:, :, :40], expected.indices.numpy())
    assert found["k_cache"].dtype == found["bounds"].dtype == np.float16
