"""The operators of a turn over caches that have a format: new tokens are stored, what is stored moves as it is."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kvc_trt import reference
from kvc_trt.methods.base.isolated_runs import page_bounds
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.operators.compaction.compact import COMPACT_TURN
from kvc_trt.operators.compaction.expected_attention import COMPACT_EXPECTED_ATTENTION_OF_TURN
from kvc_trt.operators.compaction.keydiff import COMPACT_KEYDIFF_OF_TURN
from kvc_trt.operators.compaction.tova import COMPACT_TOVA_OF_TURN
from kvc_trt.operators.tensors import K_CACHE, V_CACHE, updated
from kvc_trt.operators.turns.append_block import APPEND_BLOCK, APPEND_CHANNELS, RAISE_BOUNDS
from kvc_trt.operators.turns.extend_attention import EXTEND_ATTENTION, TURN_KEYS, TURN_VALUES
from kvc_trt.operators.turns.heavy_hitters import COMPACT_HEAVY_HITTERS_OF_TURN
from kvc_trt.operators.turns.join_block import JOIN_BLOCK, JOIN_IN_ORDER
from kvc_trt.operators.turns.replace import K_KEPT, REPLACE_CACHE, V_KEPT
from kvc_trt.operators.turns.ring import COMPACT_RING
from tests.graph.small_models import normal
from tests.operators.stored_node import stored_node
from tests.rounding import assert_close
from tests.stored_tables import FORMATS, gathered, parts_names, parts_of, read_back, stored, unpacked

HEADS, CAPACITY, BLOCK, PAGE, BUDGET, RECENT = 4, 30, 11, 3, 20, 6
STORED, NEW = np.array([0, 19, 7, 12]), np.array([3, 11, 1, 8])
UPDATED = updated(K_CACHE), updated(V_CACHE)
JOINED = TURN_KEYS, TURN_VALUES
KEPT = K_KEPT, V_KEPT


class Turn(NamedTuple):
    """A cache of vectors that were stored once, and a block of exact new ones."""

    queries: np.ndarray
    k_new: np.ndarray
    v_new: np.ndarray
    keys: np.ndarray
    """[B,G,C,D]: exact, before they were stored; zeros in free slots."""
    values: np.ndarray

    def state(self, form: str) -> dict[str, np.ndarray]:
        """Return the cache's tensors before the turn."""
        return filled(parts_of(self.keys, self.values, form), STORED)

    def new(self) -> dict[str, np.ndarray]:
        return {"k_new": self.k_new, "v_new": self.v_new, "cache_lengths": STORED, "lengths": NEW}

    def after(self) -> tuple[np.ndarray, np.ndarray]:
        """Return exact keys and values [B,G,C+M,D] of stored and new tokens, with zeros past a row's end."""
        rows, heads, _, size = self.keys.shape
        tables = []
        for cache, block in ((self.keys, self.k_new), (self.values, self.v_new)):
            table = np.zeros((rows, heads, CAPACITY + BLOCK, size), np.float32)
            for row, (m, n) in enumerate(zip(STORED, NEW, strict=True)):
                table[row, :, :m], table[row, :, m : m + n] = cache[row, :, :m], block[row, :, :n]
            tables.append(table)
        return tables[0], tables[1]


def filled(parts: dict[str, np.ndarray], counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return parts [B,G,n,.] with 0 from the `counts` [B] of each row on."""
    return {
        name: np.where(used_slots(counts, part.shape[2]), part, 0).astype(part.dtype) for name, part in parts.items()
    }


def used_slots(counts: np.ndarray, slots: int = CAPACITY) -> np.ndarray:
    return (np.arange(slots) < counts[:, None])[:, None, :, None]


def joined(made: Turn, form: str) -> dict[str, np.ndarray]:
    """Return the parts of stored and new tokens, with 0 past a row's end."""
    return filled(parts_of(*made.after(), form, JOINED), STORED + NEW)


def as_read(made: Turn, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stored and new tokens [B,G,C+M,D] as whatever reads the cache reads them."""
    own, tables = CACHE_FORMATS[form], made.after()
    keys, values = (read_back(table, vector) for table, vector in zip(tables, (own.keys, own.values), strict=True))
    return torch.from_numpy(keys), torch.from_numpy(values)


def assert_same(found, expected) -> None:
    for name, part in expected.items():
        np.testing.assert_array_equal(found[name], part, strict=True, err_msg=name)


def turn(kv_heads: int, size: int, dtype: str, seed: int) -> Turn:
    """Return a random turn with rubbish in its padding, and unusual vectors in one row."""
    rows = len(STORED)
    queries = normal(seed, rows, HEADS, BLOCK, size).astype(dtype)
    new = [normal(seed + i, rows, kv_heads, BLOCK, size) for i in (1, 2)]
    caches = [normal(seed + i, rows, kv_heads, CAPACITY, size) for i in (3, 4)]
    for table in (*new, *caches):
        table[0, :, 1] = 1.5
        table[3, :, 2] = 0
    for table in new:
        for row, n in enumerate(NEW):
            table[row, :, n:] = np.nan
    return Turn(queries, *(table.astype(dtype) for table in (*new, *caches)))


@lru_cache
def node(operator, form: str, dtype: str, size: int, **numbers: int):
    return stored_node(operator, form, numbers, size, dtype, pool_kernel=5)


SHAPES = pytest.mark.parametrize(
    ("size", "dtype", "kv_heads"), [(8, "float32", 2), (24, "float16", 4), (32, "float32", 1), (96, "float16", 2)]
)


@SHAPES
@pytest.mark.parametrize("form", FORMATS)
def test_a_block_is_stored_behind_the_entries(form, size, dtype, kv_heads):
    made = turn(kv_heads, size, dtype, seed=size)
    found = node(APPEND_BLOCK, form, dtype, size).named({**made.new(), **made.state(form)})
    keys, values = (table[:, :, :CAPACITY] for table in made.after())
    expected = filled(parts_of(keys, values, form, UPDATED), STORED + NEW)
    assert_same(found, expected)


@SHAPES
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("fp8", [0, 1])
def test_bounds_cover_the_keys_as_they_are_read(form, size, dtype, kv_heads, fp8):
    made = turn(kv_heads, size, dtype, seed=size)
    vector = CACHE_FORMATS[form].keys
    own = "float32" if fp8 else dtype
    before = page_bounds(read_back(made.keys, vector).astype(own), STORED, PAGE, fp8=bool(fp8))
    found = node(RAISE_BOUNDS, form, dtype, size, page_size=PAGE, fp8_bounds=fp8).named(
        {**made.new(), "bounds": before}
    )
    after = read_back(made.after()[0][:, :, :CAPACITY], vector).astype(own)
    np.testing.assert_array_equal(found["bounds_out"], page_bounds(after, STORED + NEW, PAGE, fp8=bool(fp8)))


@SHAPES
@pytest.mark.parametrize("form", FORMATS)
def test_channels_hold_the_codes_of_the_keys(form, size, dtype, kv_heads):
    made, own = turn(kv_heads, size, dtype, seed=size), CACHE_FORMATS[form]
    keys, values = (table[:, :, :CAPACITY] for table in made.after())
    total = read_back(np.where(used_slots(STORED), made.values, 0), own.values).sum(axis=2, dtype=np.float32)
    before = {"channels": channels_of(made.keys, own.keys, STORED), "value_sum": total}
    found = node(APPEND_CHANNELS, form, dtype, size).named({**made.new(), **before})
    np.testing.assert_array_equal(found["channels_out"], channels_of(keys, own.keys, STORED + NEW))
    expected = read_back(values, own.values).astype(np.float64).sum(axis=2)
    assert_close(found["value_sum_out"], expected, 1e-5)


def channels_of(keys: np.ndarray, vector, counts: np.ndarray) -> np.ndarray:
    """Return the codes [B,G,D,C] of keys [B,G,C,D], one for each channel."""
    codes = unpacked(stored(keys, vector)[0], vector)
    return np.ascontiguousarray(np.where(used_slots(counts), codes, np.int8(0)).swapaxes(2, 3))


@SHAPES
@pytest.mark.parametrize("form", FORMATS)
def test_stored_and_new_tokens_are_joined_as_codes(form, size, dtype, kv_heads):
    made = turn(kv_heads, size, dtype, seed=size)
    found = node(JOIN_BLOCK, form, dtype, size).named({**made.new(), **made.state(form)})
    np.testing.assert_array_equal(found["joined_lengths"], STORED + NEW)
    assert_same(filled(tables_of(found), STORED + NEW), joined(made, form))


@SHAPES
@pytest.mark.parametrize("form", FORMATS)
def test_slots_in_any_order_are_joined_in_that_of_the_text(form, size, dtype, kv_heads):
    made = turn(kv_heads, size, dtype, seed=size)
    place = np.random.default_rng(5).random((len(STORED), kv_heads, CAPACITY)).argsort(axis=-1)
    text = np.where(used_slots(STORED)[..., 0], 3 * np.arange(CAPACITY), -1)
    positions = np.take_along_axis(np.broadcast_to(text, place.shape), place, axis=2).astype(np.int32)
    shuffled = {name: np.take_along_axis(part, place[..., None], axis=2) for name, part in made.state(form).items()}
    found = node(JOIN_IN_ORDER, form, dtype, size).named({**made.new(), **shuffled, "slot_positions": positions})
    assert_same(filled(tables_of(found), STORED + NEW), joined(made, form))


def tables_of(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: part for name, part in found.items() if part.ndim == 4}


@SHAPES
@pytest.mark.parametrize("form", FORMATS)
def test_attention_reads_stored_and_new_tokens_as_they_are_stored(form, size, dtype, kv_heads):
    made = turn(kv_heads, size, dtype, seed=size)
    given = {"q": made.queries, **joined(made, form), "cache_lengths": STORED}
    found = node(EXTEND_ATTENTION, form, dtype, size).named(given)["o"]
    queries = torch.from_numpy(made.queries.astype(np.float32))
    expected = reference.extend_attention(
        queries, *as_read(made, form), torch.from_numpy(STORED), torch.from_numpy(NEW)
    )
    assert_close(np.where(used_slots(NEW, BLOCK), found, 0), expected.numpy(), 2e-6 if dtype == "float32" else 2e-3)


def windows(made: Turn, width: int) -> np.ndarray:
    """Return the last queries of each row's turn, right-aligned, NaN before its first."""
    found = np.full((*made.queries.shape[:2], width, made.queries.shape[3]), np.nan, made.queries.dtype)
    for row, n in enumerate(NEW):
        last = min(width, n)
        found[row, :, width - last :] = made.queries[row, :, n - last : n]
    return found


@SHAPES
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["observed", "tova", "keydiff", "expected", "heavy hitters"])
def test_a_turn_chooses_by_stored_values_and_moves_codes_unchanged(name, form, size, dtype, kv_heads):
    made = turn(kv_heads, size, dtype, seed=size)
    operator, numbers, given, chosen = compactions(made, name, form)
    tables = joined(made, form)
    numbers = {"prompt_budget": BUDGET, "capacity": CAPACITY, **numbers}
    inputs = {**tables, "prompt_lengths": STORED + NEW, **given}
    found = node(operator, form, dtype, size, **numbers).named(inputs)
    width = chosen.indices.shape[2]
    np.testing.assert_array_equal(found["indices"][:, :, :width], chosen.indices.numpy())
    assert (found["indices"][:, :, width:] == -1).all()
    np.testing.assert_array_equal(found["cache_lengths"], np.minimum(STORED + NEW, BUDGET))
    caches = parts_names(form)
    for cache, table in zip(caches, parts_names(form, JOINED), strict=True):
        np.testing.assert_array_equal(found[cache], gathered(tables[table], found["indices"]), strict=True)
    if "bounds" in found:
        keys = gathered(as_read(made, form)[0].numpy(), found["indices"])
        np.testing.assert_array_equal(found["bounds"], page_bounds(keys, found["cache_lengths"], PAGE, fp8=True))
    if "scores" in found:
        assert_close(found["scores"][:, :, :width], chosen.scores.numpy(), 2e-6)


def compactions(made: Turn, name: str, form: str):
    """Return an operator, its numbers, its own inputs, and what the reference keeps of the values that are read."""
    keys, values = as_read(made, form)
    lengths, new = torch.from_numpy(STORED + NEW), torch.from_numpy(NEW)
    paged, shares = {"page_size": PAGE, "fp8_bounds": 1}, {"heavy": BUDGET - RECENT, "recent": RECENT}
    if name == "observed":
        window = windows(made, 4)
        votes = reference.compact_turn(
            torch.from_numpy(np.nan_to_num(window.astype(np.float32))), keys, values, lengths, new,
            prompt_budget=BUDGET, pool_kernel=5,
        )  # fmt: skip
        given = {"q_window": window, "window_lengths": np.minimum(NEW, 4)}
        return COMPACT_TURN, {"pool_kernel": 5, **paged}, given, votes
    if name == "tova":
        last = windows(made, 1)
        query = torch.from_numpy(last.astype(np.float32))
        kept = reference.keep_attended(query, keys, values, lengths, **shares)
        return COMPACT_TOVA_OF_TURN, {"recent": RECENT}, {"q_window": last}, kept
    if name == "keydiff":
        return COMPACT_KEYDIFF_OF_TURN, paged, {}, reference.keep_distinct(keys, values, lengths, prompt_budget=BUDGET)
    if name == "expected":
        size = keys.shape[3]
        mean, spread = normal(7, len(NEW), HEADS, size), normal(8, len(NEW), HEADS, size, size)
        covariance = (np.einsum("bhde,bhfe->bhdf", spread, spread) / size).astype(np.float32)
        queries = reference.ExpectedQueries(torch.from_numpy(mean), torch.from_numpy(covariance))
        kept = reference.keep_expected(queries, keys, values, lengths, prompt_budget=BUDGET, sinks=2)
        given = {"query_mean": mean, "query_covariance": covariance}
        return COMPACT_EXPECTED_ATTENTION_OF_TURN, {"sinks": 2, **paged}, given, kept
    scores = normal(9, *keys.shape[:2], CAPACITY) ** 2
    order = np.ascontiguousarray(np.broadcast_to(np.arange(CAPACITY)[::-1], scores.shape)).astype(np.int32)
    held = np.zeros(keys.shape[:3], np.float32)
    held[:, :, :CAPACITY] = np.where(used_slots(STORED)[..., 0], scores[:, :, ::-1], 0)
    queries = torch.from_numpy(np.nan_to_num(windows(made, BLOCK).astype(np.float32)))
    kept = reference.keep_heavy_hitters_of_turn(queries, keys, values, lengths, new, torch.from_numpy(held), **shares)
    given = {
        "q": made.queries, "stored_scores": scores, "order": order, "stored_lengths": STORED, "lengths": NEW,
    }  # fmt: skip
    return COMPACT_HEAVY_HITTERS_OF_TURN, {"recent": RECENT}, given, kept


@SHAPES
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("turned", [0, CAPACITY + 5])
def test_a_ring_moves_codes_into_the_slots_of_as_many_steps(form, size, dtype, kv_heads, turned):
    made, sinks = turn(kv_heads, size, dtype, seed=size), 3
    stored_before = np.full_like(STORED, CAPACITY) if turned else STORED
    parts = parts_of(*made.after(), form, JOINED)
    found = node(COMPACT_RING, form, dtype, size, capacity=CAPACITY, sinks=sinks).named(
        {**parts, "cache_lengths": stored_before + turned, "lengths": NEW}
    )
    caches = parts_names(form)
    for cache, table in zip(caches, parts_names(form, JOINED), strict=True):
        expected = parts[table][:, :, :CAPACITY].copy()
        for row, (before, count, new) in enumerate(zip(stored_before + turned, stored_before, NEW, strict=True)):
            expected[row, :, count:] = 0
            for i in range(new):
                slot = before + i
                if slot >= CAPACITY:
                    slot = sinks + (slot - sinks) % (CAPACITY - sinks)
                expected[row, :, slot] = parts[table][row, :, count + i]
        np.testing.assert_array_equal(found[cache], expected, strict=True)


@pytest.mark.parametrize("form", FORMATS)
def test_a_cache_is_replaced_part_by_part(form):
    made = turn(2, 32, "float32", seed=1)
    kept = filled(parts_of(made.values, made.keys, form, KEPT), NEW)
    places = np.random.default_rng(3).integers(0, 99, (len(NEW), 2, CAPACITY)).astype(np.int32)
    inputs = {**made.state(form), **kept, "slot_positions": places, "positions_kept": places[::-1].copy()}
    found = node(REPLACE_CACHE, form, "float32", 32).named(inputs)
    np.testing.assert_array_equal(found["slot_positions_out"], places[::-1])
    after = parts_names(form, UPDATED)
    for name, part in zip(after, parts_names(form, KEPT), strict=True):
        np.testing.assert_array_equal(found[name], kept[part], strict=True)


@pytest.mark.parametrize("form", FORMATS)
def test_a_token_with_a_nan_is_read_as_nan_and_touches_no_other(form):
    made, spoiled = turn(2, 32, "float32", seed=2), turn(2, 32, "float32", seed=2)
    for table, channel, value in ((spoiled.k_new, 3, np.nan), (spoiled.v_new, 9, np.inf)):
        table[1, 0, 4, channel] = value
    results = [
        node(APPEND_BLOCK, form, "float32", 32).named({**one.new(), **one.state(form)}) for one in (made, spoiled)
    ]
    slot = STORED[1] + 4
    expected = filled(parts_of(*(t[:, :, :CAPACITY] for t in spoiled.after()), form, UPDATED), STORED + NEW)
    assert_same(results[1], expected)
    for name, part in results[0].items():
        part[1, 0, slot] = results[1][name][1, 0, slot]
        np.testing.assert_array_equal(results[1][name], part)
    bounds = page_bounds(read_back(made.keys, CACHE_FORMATS[form].keys), STORED, PAGE, fp8=True)
    found = node(RAISE_BOUNDS, form, "float32", 32, page_size=PAGE, fp8_bounds=1).named(
        {**spoiled.new(), "bounds": bounds}
    )
    after = read_back(spoiled.after()[0][:, :, :CAPACITY], CACHE_FORMATS[form].keys)
    np.testing.assert_array_equal(found["bounds_out"], page_bounds(after, STORED + NEW, PAGE, fp8=True))
