"""KvcHybridAttention by the native library: the reference's choices for any shape, threads and processor."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.shapes import LOWEST, HeadShape, Layout
from tests.graph.small_models import normal
from tests.operators import test_decode_attention as bodies
from tests.operators.test_decode_attention import CAPACITY, SIZE, Case, attributes_of, hybrid_body, new_entry
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode


@cache
def native(case: Case, library: Path, threads: int = 1) -> NativeNode:
    return NativeNode(hybrid_body(case), attributes_of(case), library, threads)


@pytest.mark.pairwise
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fp8_bounds", [False, True])
@pytest.mark.parametrize("case", [Case(), Case(heads=6, page_size=5), Case(kv_heads=8, page_size=1), Case(page_size=7)])
def test_rows_of_every_length_follow_the_reference_step_by_step(
    library: Path, instructions: str, case: Case, fp8_bounds: bool, threads: int
) -> None:
    case = replace(case, fp8_bounds=fp8_bounds)
    lengths = [0, 1, 11, 12, 15, 16, 19, 20, 21, 40, 58]
    state = bodies.cache(case, lengths)
    for step in range(5):
        new = new_entry(case, len(lengths), seed=100 * step)
        state = bodies.check_step(case, state, new, lengths, native(case, library, threads))
        lengths = [length + 1 for length in lengths]


CASES = [
    Case(),
    Case(heads=6),  # groups of three
    Case(page_size=1, top_r=16),
    Case(page_size=5, top_r=1, kv_heads=8),
    Case(top_k=20),
    Case(page_size=64, top_k=3, token_budget=4, dense_until=0),
    Case(page_size=64, top_k=3, token_budget=4, dense_until=0, recent=3),
    *bodies.RECENT,
]


@settings(max_examples=120)
@given(
    st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=4),
    st.sampled_from(CASES),
    st.integers(0, 10_000),
    st.booleans(),
    st.booleans(),
    ANY_INSTRUCTIONS,
)
def test_any_batch_selects_what_the_reference_selects(
    library: Path, lengths: list[int], case: Case, seed: int, rounded: bool, fp8_bounds: bool, instructions: str
) -> None:
    use_at_most(library, instructions)
    case = replace(case, fp8_bounds=fp8_bounds)
    state = bodies.cache(case, lengths, seed=seed, rounded=rounded)
    new = new_entry(case, len(lengths), seed=seed, rounded=rounded)
    bodies.check_step(case, state, new, lengths, native(case, library))


def test_all_zero_queries_read_the_lowest_tokens(library: Path, instructions: str) -> None:
    """Every page ties, the partial last one included: the lowest indices win."""
    case = Case()
    query, k_new, v_new = new_entry(case, 2)
    query[:] = 0
    found = native(case, library)(query, k_new, v_new, *bodies.cache(case, [40, 61]), np.array([40, 61]))
    np.testing.assert_array_equal(found["selected"][:, :, :12], np.broadcast_to(np.arange(12), (2, 2, 12)))


def test_nan_ranks_below_every_number(library: Path, instructions: str) -> None:
    """A query that is NaN makes all pages NaN; one page that is makes the softmax NaN, and so all of them."""
    case = Case()
    query, k_new, v_new = new_entry(case, 1)
    keys, values, bounds = bodies.cache(case, [40])
    query[0, 0] = np.nan
    found = native(case, library)(query, k_new, v_new, keys, values, bounds, np.array([40]))
    np.testing.assert_array_equal(found["selected"][0, 0, :12], np.arange(12))
    assert np.isfinite(found["output"][0, 4:]).all(), "heads of the other group"


@pytest.mark.parametrize("length", [40, 41, 42])
def test_a_nan_key_makes_the_bounds_of_its_page_nan_for_good(library: Path, instructions: str, length: int) -> None:
    """Wherever in the page it lies: the next keys of the page do not make the bound a number again."""
    case = Case()
    keys, values, bounds = bodies.cache(case, [length])
    query, k_new, v_new = new_entry(case, 1)
    k_new[0, 0, 3] = np.nan
    for step, key in enumerate((k_new, np.zeros_like(k_new), np.ones_like(k_new))):
        found = native(case, library)(query, key, v_new, keys, values, bounds, np.array([length + step]))
        keys, values, bounds = found["k_cache_out"], found["v_cache_out"], found["bounds_out"]
        page = length // case.page_size
        assert np.isnan(bounds[0, 0, [3, 3 + SIZE], page]).all(), step
        assert np.count_nonzero(np.isnan(bounds)) == 2, step
        np.testing.assert_array_equal(found["selected"][0, 0, :12], np.arange(12))


@pytest.mark.parametrize("unusual", [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, -1e-30, -0.0, 57345.0, -57343.0])
def test_fp8_bounds_of_unusual_keys_are_the_references(library: Path, instructions: str, unusual: float) -> None:
    use_at_most(library, instructions)
    case = replace(Case(), fp8_bounds=True)
    keys, values, bounds = bodies.cache(case, [40])
    query, k_new, v_new = new_entry(case, 1)
    k_new[0, 0, 3] = unusual
    keys[0, 1, 39, 5] = unusual
    bounds = bodies.bounds_of(case, keys, [40])[1]
    found = native(case, library)(query, k_new, v_new, keys, values, bounds, np.array([40]))
    np.testing.assert_array_equal(found["bounds_out"], bodies.bounds_of(case, found["k_cache_out"], [41])[1])


def test_equal_pages_tie_wherever_they_lie(library: Path, instructions: str) -> None:
    """Whole vectors and the remainder compute the same: every page repeats, the lowest win."""
    case = replace(Case(), page_size=1, top_r=16)
    query, k_new, v_new = new_entry(case, 1)
    one = normal(5, 1, 2, 1, SIZE)
    k_new = one[:, :, 0]
    keys = np.where(np.arange(CAPACITY)[None, None, :, None] < 63, np.repeat(one, CAPACITY, axis=2), np.float32(0))
    bounds = np.full((1, 2, 2 * SIZE, CAPACITY), np.float32(LOWEST["float32"]))
    bounds[..., :63] = np.concatenate([one, -one], axis=-1).transpose(0, 1, 3, 2)
    found = native(case, library)(query, k_new, v_new, keys, normal(6, 1, 2, CAPACITY, SIZE), bounds, np.array([63]))
    np.testing.assert_array_equal(found["selected"][:, :, :12], np.broadcast_to(np.arange(12), (1, 2, 12)))


def test_instruction_sets_and_threads_choose_alike(library: Path, instructions: str) -> None:
    case = replace(Case(), page_size=2, top_k=10)
    lengths = [30, 63, 41]
    arrays = (*new_entry(case, 3), *bodies.cache(case, lengths), np.array(lengths))
    expected = bodies.hybrid(case)(*arrays)["selected"]
    for threads in (1, 2):
        np.testing.assert_array_equal(native(case, library, threads)(*arrays)["selected"], expected)


@pytest.mark.parametrize("lengths", [[0], [5, 19], [19, 19], [3, 18, 7]])
def test_rows_that_fit_are_bit_identical_to_dense(library: Path, instructions: str, lengths: list[int]) -> None:
    case = Case()
    layout = Layout(HeadShape(case.heads, case.kv_heads, SIZE))
    dense = NativeNode(DENSE_ATTENTION.body(layout), {"dense_until": 20}, library)
    new, (keys, values, bounds) = new_entry(case, len(lengths)), bodies.cache(case, lengths)
    sparse = native(case, library)(*new, keys, values, bounds, np.array(lengths))
    np.testing.assert_array_equal(sparse["output"], dense(*new, keys, values, np.array(lengths))["output"])


def test_a_list_that_nobody_reads_is_not_written(library: Path) -> None:
    case = Case()
    node = NativeNode(hybrid_body(case), attributes_of(case), library)
    arrays = (*new_entry(case, 1), *bodies.cache(case, [40]), np.array([40]))
    types = tuple(str(array.dtype) for array in arrays)
    whole = node(*arrays)
    model = node.model(types)
    del model.graph.output[-1]
    node.model = lambda types: model
    results = node.session(types).run(None, dict(zip(node.body.input, arrays, strict=True)))
    for name, result in zip(node.body.output, results, strict=False):
        np.testing.assert_array_equal(result, whole[name])
    assert len(results) == len(HYBRID_ATTENTION.outputs) - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds": (1, 2, 32, 21)}, "bounds: expected 22 pages, found 21"),
        ({"bounds": (1, 2, 31, 22)}, "bounds: expected 32 rows, found 31"),
        ({"query": (1, 7, 16)}, "query: expected a multiple of 2 heads, found 7"),
        ({"k_new": (1, 3, 16)}, "kv heads = 3, found 2"),
        ({"cache_lengths": (2,)}, "cache_lengths: expected batch = 1, found 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(library: Path, change: dict[str, tuple[int, ...]], message: str) -> None:
    case = Case()
    names = ("query", "k_new", "v_new", "k_cache", "v_cache", "bounds", "cache_lengths")
    arrays = dict(zip(names, (*new_entry(case, 1), *bodies.cache(case, [40]), np.array([40])), strict=True))
    arrays |= {name: np.zeros(shape, arrays[name].dtype) for name, shape in change.items()}
    with pytest.raises(Exception, match=message):
        native(case, library)(*arrays.values())
