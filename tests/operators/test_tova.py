"""The operators of TOVA alone: a prompt's compaction, and steps against the reference."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.tova_attention import TOVA_ATTENTION
from kvc_trt.operators.compaction.tova import COMPACT_TOVA
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode, normal
from tests.rounding import assert_close

HEADS, SIZE = 8, 16
STATE = ("k_cache", "v_cache", "slot_positions")


@lru_cache
def operator(operator, kv_heads, **attributes) -> SingleNode:
    shape = HeadShape(None, None, SIZE) if kv_heads is None else HeadShape(HEADS, kv_heads, SIZE)
    return SingleNode(operator.body(Layout(shape)), attributes)


def state_of(prompts, capacity, kv_heads, seed):
    """Caches of rows with `prompts` entries each, in the order of the text."""
    used = np.arange(capacity) < np.array(prompts)[:, None, None]
    tables = [normal(seed + i, len(prompts), kv_heads, capacity, SIZE) * used[..., None] for i in range(2)]
    slots = np.where(used, np.arange(capacity), -1)
    slots = np.broadcast_to(slots, (len(prompts), kv_heads, capacity)).astype(np.int32)
    return [np.ascontiguousarray(table) for table in (*tables, slots)]


def run(prompts, steps, capacity, recent, *, kv_heads=2, seed=0, named=True, alike=False):
    """Rows are replayed by the reference in the order of the text, one row at a time."""
    node = operator(TOVA_ATTENTION, kv_heads if named else None, capacity=capacity, recent=recent)
    state = state_of(prompts, capacity, kv_heads, seed)
    rows = [[torch.from_numpy(t[row, :, :n].copy()) for t in state] for row, n in enumerate(prompts)]
    for step in range(steps):
        lengths = np.array(prompts) + step
        query, *new = (
            normal(seed + 7 + 3 * step + i, len(prompts), heads, SIZE)
            for i, heads in enumerate((HEADS, kv_heads, kv_heads))
        )
        if alike:  # a query of zeros pays every entry alike
            query[:] = 0
        found = node(query, *new, *state, lengths, lengths)
        state = [found[f"{name}_out"] for name in STATE]
        for row, (keys, values, positions) in enumerate(rows):
            k_new, v_new = (torch.from_numpy(array[row])[:, None] for array in new)
            keys, values = torch.cat([keys, k_new], 1), torch.cat([values, v_new], 1)
            positions = torch.cat([positions, torch.full((kv_heads, 1), int(lengths[row]))], 1)
            expected = reference.tova_attention(
                torch.from_numpy(query[row])[None], keys[None], values[None], torch.tensor([keys.shape[1]]),
                heavy=capacity - 1 - recent, recent=recent,
            )  # fmt: skip
            assert_close(found["output"][row], expected.output[0], 2e-6)
            kept = expected.kept[0]
            positions = positions.gather(1, kept)
            keys, values = (t.gather(1, kept[..., None].expand(-1, -1, SIZE)) for t in (keys, values))
            rows[row] = [keys, values, positions]
            slots = state[2][row]
            order = np.argsort(np.where(slots < 0, 1 << 30, slots), axis=1)[:, : kept.shape[1]]
            np.testing.assert_array_equal(np.take_along_axis(slots, order, 1), positions.numpy())
            np.testing.assert_array_equal(np.take_along_axis(state[0][row], order[..., None], 1), keys.numpy())
            np.testing.assert_array_equal(np.take_along_axis(state[1][row], order[..., None], 1), values.numpy())
            assert (slots >= 0).sum() == kv_heads * kept.shape[1]


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("recent", [1, 6, 12])
def test_steps_follow_the_reference(recent, kv_heads):
    run([0, 1, 11, 12], 30, 13, recent, kv_heads=kv_heads)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 9), st.integers(1, 8), st.lists(st.integers(0, 8), min_size=1, max_size=3),
    st.sampled_from([1, 2, 8]), st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_random_steps_follow_the_reference(capacity, recent, prompts, kv_heads, named, seed):
    prompts = [min(count, capacity - 1) for count in prompts]
    run(prompts, 12, capacity, min(recent, capacity - 1), kv_heads=kv_heads, seed=seed, named=named)


def test_of_equal_probabilities_the_last_is_dropped():
    run([8, 5], 10, 9, 3, alike=True)


@pytest.mark.parametrize("lengths", [[0], [5, 11], [11, 3]])
def test_rows_that_fit_are_bit_identical_to_dense(lengths):
    batch, lengths = len(lengths), np.array(lengths)
    step = [normal(1, batch, HEADS, SIZE), *(normal(i, batch, 2, SIZE) for i in (2, 3))]
    keys, values, slots = state_of(lengths.tolist(), 12, 2, 4)
    dense = operator(DENSE_ATTENTION, 2, dense_until=12)(*step, keys, values, lengths)["output"]
    found = operator(TOVA_ATTENTION, 2, capacity=12, recent=1)(*step, keys, values, slots, lengths, lengths)
    np.testing.assert_array_equal(found["output"], dense)


def test_half_precision_caches_drop_what_single_ones_drop():
    state = state_of([12, 5], 13, 2, 0)
    step = [normal(1, 2, HEADS, SIZE), *(normal(i, 2, 2, SIZE) for i in (2, 3))]
    node, lengths = operator(TOVA_ATTENTION, 2, capacity=13, recent=6), np.array([12, 5])
    halves = [array.astype(np.float16) for array in (*step, *state[:2])]
    found = node(*halves, state[2], lengths, lengths)
    expected = node(*(half.astype(np.float32) for half in halves), state[2], lengths, lengths)
    assert found["output"].dtype == np.float16
    np.testing.assert_array_equal(found["slot_positions_out"], expected["slot_positions_out"])


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(("budget", "recent"), [(32, 1), (33, 16), (40, 40), (7, 3), (400, 1)])
def test_prompts_are_compacted_as_the_reference_does(budget, recent, kv_heads):
    lengths, capacity = [250, 1, 7, 40, 33, 256], budget + 1
    query = normal(1, len(lengths), HEADS, 1, SIZE)
    keys, values = (normal(i, len(lengths), kv_heads, 256, SIZE) for i in (2, 3))
    for row, n in enumerate(lengths):
        keys[row, :, n:], values[row, :, n:] = 1e9, np.nan
    node = operator(COMPACT_TOVA, None, prompt_budget=budget, capacity=capacity, recent=recent)
    found = node(query, keys, values, np.array(lengths))
    expected = reference.keep_attended(
        *map(torch.from_numpy, (query, keys, values)), torch.tensor(lengths), heavy=budget - recent, recent=recent
    )
    width = expected.indices.shape[2]
    np.testing.assert_array_equal(found["indices"][:, :, :width], expected.indices.numpy())
    assert (found["indices"][:, :, width:] == -1).all()
    np.testing.assert_array_equal(found["slot_positions"], found["indices"])
    np.testing.assert_array_equal(found["cache_lengths"], expected.lengths.numpy())
    for name, table in (("k_cache", expected.keys), ("v_cache", expected.values)):
        np.testing.assert_array_equal(found[name][:, :, :width], table.numpy())
        assert not found[name][:, :, width:].any()


def test_a_constant_prompt_keeps_its_beginning_and_its_last_token():
    ones = np.ones((1, 2, 60, SIZE), np.float32)
    node = operator(COMPACT_TOVA, None, prompt_budget=10, capacity=11, recent=1)
    found = node(np.ones((1, HEADS, 1, SIZE), np.float32), ones, ones, np.array([60]))
    np.testing.assert_array_equal(found["indices"], [[[*range(9), 59, -1]] * 2])
