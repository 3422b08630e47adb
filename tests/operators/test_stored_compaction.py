"""Compaction of prompts into a cache that has a format: exact votes, survivors stored as the reference stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kvc_trt import reference
from kvc_trt.methods.base.isolated_runs import page_bounds
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.compaction.expected_attention import COMPACT_EXPECTED_ATTENTION
from kvc_trt.operators.compaction.heavy_hitters import COMPACT_HEAVY_HITTERS
from kvc_trt.operators.compaction.keydiff import COMPACT_KEYDIFF
from kvc_trt.operators.compaction.ranked import COMPACT_RANKED, KEPT, TRIM
from kvc_trt.operators.compaction.store_tokens import STORE_TOKENS
from kvc_trt.operators.compaction.tova import COMPACT_TOVA
from kvc_trt.operators.schema import Operator
from tests.graph.small_models import SingleNode, normal
from tests.operators.stored_node import stored_node
from tests.stored_tables import FORMATS, gathered, parts_of, read_back

HEADS, WINDOW, LENGTH, BUDGET, CAPACITY, PAGE, SINKS, RECENT = 4, 8, 128, 40, 60, 3, 2, 16
LENGTHS = np.array([128, 100, 40, 9, 1])
WHOLE_ROW = 2
"""A row that fits, so that nothing in it decides what stays."""


class Prompts(NamedTuple):
    queries: np.ndarray
    """[B,H,S,D]"""
    keys: np.ndarray
    values: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray

    @property
    def window(self) -> np.ndarray:
        return np.ascontiguousarray(self.queries[:, :, :WINDOW])

    def tensors(self, queries: np.ndarray) -> list[torch.Tensor]:
        tables = [np.asarray(table, np.float32) for table in (queries, self.keys, self.values)]
        return [torch.from_numpy(table) for table in (*tables, LENGTHS)]


def prompts(kv_heads: int, size: int, dtype: str, seed: int) -> Prompts:
    """Random prompts with rubbish past their ends, and unusual vectors in a row that fits."""
    rows = len(LENGTHS)
    queries = normal(seed, rows, HEADS, LENGTH, size)
    keys, values = (normal(seed + i, rows, kv_heads, LENGTH, size) for i in (1, 2))
    for row, n in enumerate(LENGTHS):
        keys[row, :, n:], values[row, :, n:] = 100, np.nan
    for table in (keys, values):
        unusual = table[WHOLE_ROW, 0]
        unusual[3, 5], unusual[4, 2], unusual[5, 7] = np.nan, np.inf, -np.inf
        unusual[6], unusual[7], unusual[8], unusual[9, 0] = 0, 1.5, 1e-40, 3e4
    mean, spread = normal(seed + 3, rows, HEADS, size), normal(seed + 4, rows, HEADS, size, size)
    covariance = np.einsum("bhde,bhfe->bhdf", spread, spread) / size
    halves = (table.astype(dtype) for table in (queries, keys, values))
    return Prompts(*halves, mean, covariance.astype(np.float32))


def heavy_hitters(made: Prompts) -> Any:
    aligned = np.zeros_like(made.queries)
    for row, n in enumerate(LENGTHS):
        aligned[row, :, LENGTH - n :] = made.queries[row, :, :n]
    return reference.keep_heavy_hitters(*made.tensors(aligned), heavy=BUDGET - RECENT, recent=RECENT)


@dataclass(frozen=True)
class Case:
    """One operator with its numbers, its own inputs and the reference's choice."""

    operator: Operator
    numbers: Mapping[str, int]
    given: Callable[[Prompts], Mapping[str, np.ndarray]]
    chosen: Callable[[Prompts], Any]


PAGED = {"page_size": PAGE, "fp8_bounds": 1}
CASES = {
    "observed": Case(
        COMPACT,
        {"pool_kernel": 5, **PAGED},
        lambda made: {"q_window": made.window},
        lambda made: reference.compact(*made.tensors(made.window), prompt_budget=BUDGET, pool_kernel=5),
    ),
    "tova": Case(
        COMPACT_TOVA,
        {"recent": RECENT},
        lambda made: {"q_window": np.ascontiguousarray(made.queries[:, :, :1])},
        lambda made: reference.keep_attended(
            *made.tensors(made.queries[:, :, :1]), heavy=BUDGET - RECENT, recent=RECENT
        ),
    ),
    "keydiff": Case(
        COMPACT_KEYDIFF,
        PAGED,
        lambda made: {},
        lambda made: reference.keep_distinct(*made.tensors(made.queries)[1:], prompt_budget=BUDGET),
    ),
    "expected": Case(
        COMPACT_EXPECTED_ATTENTION,
        {"sinks": SINKS, **PAGED},
        lambda made: {"query_mean": made.mean, "query_covariance": made.covariance},
        lambda made: reference.keep_expected(
            reference.ExpectedQueries(torch.from_numpy(made.mean), torch.from_numpy(made.covariance)),
            *made.tensors(made.queries)[1:],
            prompt_budget=BUDGET,
            sinks=SINKS,
        ),
    ),
    "heavy hitters": Case(COMPACT_HEAVY_HITTERS, {"recent": RECENT}, lambda made: {"q": made.queries}, heavy_hitters),
}


@lru_cache
def node(name: str, form: str, dtype: str, size: int) -> SingleNode:
    case = CASES[name]
    numbers = {"prompt_budget": BUDGET, "capacity": CAPACITY, **case.numbers}
    return stored_node(case.operator, form, numbers, size, dtype, pool_kernel=5)


@pytest.mark.pairwise
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [8, 24, 32, 64, 96])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_survivors_of_exact_votes_are_stored_as_the_reference_stores_them(name, form, size, dtype, kv_heads):
    case, made = CASES[name], prompts(kv_heads, size, dtype, seed=size)
    found = node(name, form, dtype, size).named(
        {**case.given(made), "k": made.keys, "v": made.values, "prompt_lengths": LENGTHS}
    )
    expected = case.chosen(made)
    check_lists(found, expected)
    check_tables(found, made.keys, made.values, form)


def check_lists(found, expected) -> None:
    width = expected.indices.shape[2]
    np.testing.assert_array_equal(found["indices"][:, :, :width], expected.indices.numpy())
    assert (found["indices"][:, :, width:] == -1).all()
    np.testing.assert_array_equal(found["cache_lengths"], expected.lengths.numpy())


def check_tables(found, keys, values, form: str) -> None:
    """Hold codes, scales, minima and bounds to those of the vectors at the kept positions."""
    used = found["indices"][..., None] >= 0
    kept = [gathered(table, found["indices"]) for table in (keys, values)]
    for name, part in parts_of(*kept, form).items():
        np.testing.assert_array_equal(found[name], np.where(used, part, 0), strict=True)
    if "bounds" in found:
        read = read_back(kept[0], CACHE_FORMATS[form].keys)
        np.testing.assert_array_equal(found["bounds"], page_bounds(read, found["cache_lengths"], PAGE, fp8=True))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("size", "dtype"), [(24, "float32"), (64, "float16")])
def test_ranked_tokens_are_stored_once_and_trimmed_as_codes(form, size, dtype):
    made, budgets = prompts(2, size, dtype, seed=1), np.array([40, 17, 40, 8, 8])
    ranked = stored_node(COMPACT_RANKED, form, {"prompt_budget": BUDGET}, size, dtype, pool_kernel=5)
    given = {"q_window": made.window, "k": made.keys, "v": made.values, "prompt_lengths": LENGTHS}
    kept = ranked.named(given)
    places = kept["kept"].astype(np.int32)
    for name, part in parts_of(gathered(made.keys, places), gathered(made.values, places), form, KEPT[:2]).items():
        np.testing.assert_array_equal(kept[name], part, strict=True)
    trim = stored_node(TRIM, form, {"capacity": CAPACITY, **PAGED}, size, dtype)
    found = trim.named({**kept, "budgets": budgets, "prompt_lengths": LENGTHS})
    np.testing.assert_array_equal(found["cache_lengths"], np.minimum(LENGTHS, budgets))
    for row, budget in enumerate(budgets):
        one = slice(row, row + 1)
        queries, *tables = (table[one] for table in made.tensors(made.window))
        expected = reference.compact(queries, *tables, prompt_budget=int(budget), pool_kernel=5).indices
        np.testing.assert_array_equal(found["indices"][one, :, : expected.shape[2]], expected.numpy())
    check_tables(found, made.keys, made.values, form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("size", "dtype"), [(24, "float32"), (64, "float16")])
@pytest.mark.parametrize("capacity", [CAPACITY, LENGTH + 9])
def test_the_first_tokens_are_stored(form, size, dtype, capacity):
    made = prompts(2, size, dtype, seed=2)
    node = stored_node(STORE_TOKENS, form, {"capacity": capacity}, size, dtype)
    found = node.named({"k": made.keys, "v": made.values, "prompt_lengths": LENGTHS})
    places = np.broadcast_to(np.arange(capacity), (len(LENGTHS), 2, capacity))
    found["indices"] = np.where(places < LENGTHS[:, None, None], places, -1)
    check_tables(found, made.keys, made.values, form)


@pytest.mark.parametrize("form", FORMATS)
def test_a_constant_prompt_is_one_vector_many_times(form):
    """All scores tie, and all survivors have the same codes."""
    made = prompts(2, 32, "float32", seed=3)
    keys, values = (np.full_like(table, 1.5) for table in (made.keys, made.values))
    found = node("keydiff", form, "float32", 32).named({"k": keys, "v": values, "prompt_lengths": LENGTHS})
    np.testing.assert_array_equal(found["indices"][0, 0, :BUDGET], np.arange(BUDGET))
    check_tables(found, keys, values, form)
