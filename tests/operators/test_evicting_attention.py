"""The operators that drop a token for each that they append, alone, step by step against the reference."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.heavy_hitter_attention import HEAVY_HITTER_ATTENTION
from kvc_trt.operators.attention.recent_attention import RANKED_RECENT_ATTENTION, RECENT_ATTENTION
from kvc_trt.operators.compaction.heavy_hitters import COMPACT_HEAVY_HITTERS
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode, normal
from tests.rounding import assert_close

ROOT = Path(__file__).parents[2]
HEADS, SIZE = 8, 16
TABLES = [
    function(np.arange(64)[:, None] * 0.3 ** np.arange(SIZE // 2)).astype(np.float32) for function in (np.cos, np.sin)
]


@lru_cache
def operator(kind, kv_heads, **attributes) -> SingleNode:
    shape = HeadShape(None, None, SIZE) if kv_heads is None else HeadShape(HEADS, kv_heads, SIZE)
    return SingleNode(kind.body(Layout(shape)), attributes)


def rotated(x, positions):
    """Rotary embedding [..., n, D] at `positions` [n], the halves of a vector being its pairs."""
    cosine, sine = (table[positions] for table in TABLES)
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)


def dense(query, keys, values):
    tensors = (torch.from_numpy(array[None]) for array in (query, keys, values))
    return reference.dense_attention(*tensors, torch.tensor([keys.shape[1]]))[0].numpy()


def run_ring(prompts, steps, capacity, sinks, *, ranked, kv_heads=2, seed=0, named=True):
    """Feed `steps` tokens to rows that hold `prompts` entries; every row is replayed as a list of tokens."""
    kind = RANKED_RECENT_ATTENTION if ranked else RECENT_ATTENTION
    node = operator(kind, kv_heads if named else None, capacity=capacity, sinks=sinks)
    batch = len(prompts)
    history = normal(seed, 2, batch, max(prompts) + steps, kv_heads, SIZE)
    tables = [np.zeros((batch, kv_heads, capacity, SIZE), np.float32) for _ in range(2)]
    for table, tokens in zip(tables, history, strict=True):
        for row, count in enumerate(prompts):
            table[row, :, :count] = tokens[row, :count].transpose(1, 0, 2)
    for step in range(steps):
        query, lengths = normal(seed + step + 1, batch, HEADS, SIZE), np.array(prompts) + step
        new = [tokens[np.arange(batch), lengths] for tokens in history]
        found = node(query, *new, *tables, lengths, *(TABLES if ranked else []))
        tables = [found["k_cache_out"], found["v_cache_out"]]
        for row, last in enumerate(lengths.tolist()):
            tokens = list(range(last + 1))
            if last + 1 > capacity:
                tokens = tokens[:sinks] + tokens[last + 1 - (capacity - sinks) :]
            keys, values = (table[row, tokens].transpose(1, 0, 2) for table in history)
            asked = query[row]
            if ranked:
                ranks = np.arange(len(tokens))
                keys, asked = rotated(keys, ranks), rotated(asked[:, None], ranks[-1:])[:, 0]
            assert_close(found["output"][row], dense(asked, keys, values), 2e-6)
            stored = {tuple(key) for key in tables[0][row, 0, : len(tokens)].tolist()}
            assert stored == {tuple(key) for key in history[0][row, tokens, 0].tolist()}


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize(("capacity", "sinks"), [(12, 4), (12, 0), (5, 4), (1, 0), (2, 1)])
def test_the_ring_holds_the_first_and_the_last_tokens(capacity, sinks, ranked):
    """Three turns of the ring, for rows that start empty, nearly full and full."""
    prompts = sorted({0, 1, capacity - 1, capacity})
    run_ring(prompts, 3 * capacity + 2, capacity, sinks, ranked=ranked)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9), st.integers(0, 8), st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.sampled_from([1, 2, 8]), st.booleans(), st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_random_rings_follow_the_reference(capacity, sinks, prompts, kv_heads, ranked, named, seed):
    sinks, prompts = min(sinks, capacity - 1), [min(count, capacity) for count in prompts]
    run_ring(prompts, 14, capacity, sinks, ranked=ranked, kv_heads=kv_heads, seed=seed, named=named)


@pytest.mark.parametrize("lengths", [[0], [5, 11], [11, 3]])
def test_rows_that_fit_are_bit_identical_to_dense(lengths):
    batch, lengths = len(lengths), np.array(lengths)
    step = [normal(1, batch, HEADS, SIZE), *(normal(i, batch, 2, SIZE) for i in (2, 3))]
    state = [normal(i, batch, 2, 12, SIZE) for i in (4, 5)]
    wider = [np.pad(table, ((0, 0), (0, 0), (0, 100), (0, 0))) for table in state]
    expected = operator(DENSE_ATTENTION, 2, dense_until=12)(*step, *wider, lengths)["output"]
    ring = operator(RECENT_ATTENTION, 2, capacity=12, sinks=4)(*step, *state, lengths)["output"]
    np.testing.assert_array_equal(ring, expected)
    slots = np.broadcast_to(np.where(np.arange(12) < lengths[:, None, None], np.arange(12), -1), (batch, 2, 12))
    sums = np.abs(normal(6, batch, 2, 12))
    heavy = operator(HEAVY_HITTER_ATTENTION, 2, capacity=12, recent=4)
    found = heavy(*step, *state, sums, slots.astype(np.int32), lengths, lengths)["output"]
    np.testing.assert_array_equal(found, expected)


def heavy_state(prompts, capacity, kv_heads, seed):
    """Caches of rows with `prompts` entries each, in the order of the text."""
    batch = len(prompts)
    used = np.arange(capacity) < np.array(prompts)[:, None, None]
    keys, values = (normal(seed + i, batch, kv_heads, capacity, SIZE) * used[..., None] for i in range(2))
    sums = np.abs(normal(seed + 2, batch, kv_heads, capacity)) * used
    slots = np.broadcast_to(np.where(used, np.arange(capacity), -1), sums.shape).astype(np.int32)
    return [np.ascontiguousarray(table) for table in (keys, values, sums.astype(np.float32), slots)]


def ordered(found, row, count):
    """Return a row's entries in the order of the text: keys, sums, positions of each KV head."""
    positions = found["slot_positions_out"][row]
    order = np.argsort(np.where(positions < 0, 1 << 30, positions), axis=1)[:, :count]
    keys = np.take_along_axis(found["k_cache_out"][row], order[..., None], 1)
    return keys, *(np.take_along_axis(table, order, 1) for table in (found["scores_out"][row], positions))


def run_heavy(prompts, steps, capacity, recent, *, kv_heads=2, seed=0, named=True, rounded=False):
    """Rows are replayed by the reference in the order of the text, one row at a time."""
    node = operator(HEAVY_HITTER_ATTENTION, kv_heads if named else None, capacity=capacity, recent=recent)
    state = heavy_state(prompts, capacity, kv_heads, seed)
    if rounded:  # equal sums
        state[2] = np.round(state[2])
    rows = [[torch.from_numpy(t[row, :, :n].copy()) for t in state] for row, n in enumerate(prompts)]
    for step in range(steps):
        lengths = np.array(prompts) + step
        arrays = (
            normal(seed + 7 + 3 * step, len(prompts), HEADS, SIZE),
            *(normal(seed + 8 + 3 * step + i, len(prompts), kv_heads, SIZE) for i in range(2)),
        )
        if rounded:  # a query of zeros pays every entry alike
            arrays[0][:] = 0
        found = node(*arrays, *state, lengths, lengths)
        state = [found[f"{kind}_out"] for kind in ("k_cache", "v_cache", "scores", "slot_positions")]
        for row, (keys, values, sums, positions) in enumerate(rows):
            query, k_new, v_new = (torch.from_numpy(array[row]) for array in arrays)
            keys, values = torch.cat([keys, k_new[:, None]], 1), torch.cat([values, v_new[:, None]], 1)
            sums = torch.cat([sums, sums.new_zeros(kv_heads, 1)], 1)
            positions = torch.cat([positions, torch.full((kv_heads, 1), int(lengths[row]))], 1)
            step_of = reference.heavy_hitter_attention(
                query[None], keys[None], values[None], torch.tensor([keys.shape[1]]), sums[None],
                heavy=capacity - 1 - recent, recent=recent,
            )  # fmt: skip
            assert_close(found["output"][row], step_of.output[0], 2e-6)
            kept = step_of.kept[0]
            sums, positions = step_of.scores[0].gather(1, kept), positions.gather(1, kept)
            keys, values = (t.gather(1, kept[..., None].expand(-1, -1, SIZE)) for t in (keys, values))
            rows[row] = [keys, values, sums, positions]
            found_keys, found_sums, found_positions = ordered(found, row, kept.shape[1])
            np.testing.assert_array_equal(found_positions, positions.numpy())
            np.testing.assert_array_equal(found_keys, keys.numpy())
            assert_close(found_sums, sums)
            assert (found["slot_positions_out"][row] >= 0).sum() == kv_heads * kept.shape[1]


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("recent", [1, 6, 11, 12])
def test_heavy_hitters_follow_the_reference_step_by_step(recent, kv_heads):
    run_heavy([0, 1, 11, 12], 30, 13, recent, kv_heads=kv_heads)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 9), st.integers(1, 8), st.lists(st.integers(0, 8), min_size=1, max_size=3),
    st.sampled_from([1, 2, 8]), st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_random_heavy_hitters_follow_the_reference(capacity, recent, prompts, kv_heads, named, seed):
    prompts = [min(count, capacity - 1) for count in prompts]
    run_heavy(prompts, 12, capacity, min(recent, capacity - 1), kv_heads=kv_heads, seed=seed, named=named)


def test_of_equal_sums_the_last_is_dropped():
    run_heavy([8, 5], 10, 9, 3, rounded=True)


def test_nan_ranks_below_every_sum():
    state = heavy_state([4], 5, 1, 0)
    state[2][0, 0] = [0.5, np.nan, 0.25, 0.125, 0.0]
    step = [np.zeros((1, HEADS, SIZE), np.float32), *(normal(i, 1, 1, SIZE) for i in (1, 2))]
    found = operator(HEAVY_HITTER_ATTENTION, 1, capacity=5, recent=1)(*step, *state, np.array([4]), np.array([4]))
    np.testing.assert_array_equal(found["slot_positions_out"][0, 0], [0, -1, 2, 3, 4])


def test_half_precision_caches_keep_their_sums_in_single():
    state = heavy_state([12, 5], 13, 2, 0)
    halves = [table.astype(np.float16) for table in state[:2]]
    step = [normal(1, 2, HEADS, SIZE), *(normal(i, 2, 2, SIZE) for i in (2, 3))]
    node, lengths = operator(HEAVY_HITTER_ATTENTION, 2, capacity=13, recent=6), np.array([12, 5])
    found = node(*(array.astype(np.float16) for array in step), *halves, *state[2:], lengths, lengths)
    assert (found["output"].dtype, found["scores_out"].dtype) == (np.float16, np.float32)
    expected = node(*step, *state, lengths, lengths)
    np.testing.assert_array_equal(found["slot_positions_out"], expected["slot_positions_out"])
    np.testing.assert_allclose(found["output"], expected["output"], atol=3e-3)


@pytest.mark.parametrize(("budget", "recent"), [(32, 16), (33, 1), (40, 40), (7, 3), (400, 200)])
def test_prompts_are_compacted_as_the_reference_does(budget, recent):
    lengths, capacity = [250, 1, 7, 40, 33, 256], budget + 1
    queries, keys, values = (normal(i, len(lengths), heads, 256, SIZE) for i, heads in enumerate((HEADS, 2, 2)))
    attributes = {"prompt_budget": budget, "capacity": capacity, "recent": recent}
    found = SingleNode(COMPACT_HEAVY_HITTERS.body(Layout(HeadShape(None, None, 0))), attributes)(
        queries, keys, values, np.array(lengths)
    )
    aligned = np.stack([np.roll(row, 256 - n, axis=1) for row, n in zip(queries, lengths, strict=True)])
    expected = reference.keep_heavy_hitters(
        *map(torch.from_numpy, (aligned, keys, values)), torch.tensor(lengths), heavy=budget - recent, recent=recent
    )
    width = expected.indices.shape[2]
    np.testing.assert_array_equal(found["indices"][:, :, :width], expected.indices.numpy())
    np.testing.assert_array_equal(found["slot_positions"], found["indices"])
    np.testing.assert_array_equal(found["cache_lengths"], expected.lengths.numpy())
    np.testing.assert_allclose(found["scores"][:, :, :width], expected.scores.numpy(), rtol=1e-5)
    for name, table in (("k_cache", expected.keys), ("v_cache", expected.values)):
        np.testing.assert_array_equal(found[name][:, :, :width], table.numpy())
        assert not found[name][:, :, width:].any()


MEASURE = """
import resource, sys
import numpy as np
from kvc_trt.operators.compaction.heavy_hitters import COMPACT_HEAVY_HITTERS
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode
body = COMPACT_HEAVY_HITTERS.body(Layout(HeadShape(None, None, 16)))
node = SingleNode(body, {"prompt_budget": 32, "capacity": 33, "recent": 16})
def run(length):
    tables = (np.ones((1, heads, length, 16), np.float32) for heads in (4, 1, 1))
    node(*tables, np.array([length]))
run(128)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(int(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_prompts_sums_take_far_less_memory_than_its_scores():
    """16,384 tokens and 4 heads: one S x S matrix would take 4 GiB."""
    process = subprocess.run([sys.executable, "-c", MEASURE, "16384"], check=True, capture_output=True, cwd=ROOT)
    assert int(process.stdout) * 1024 < 0.1 * 4 * 4 * 16384**2
