"""A constructed near-tie is admitted, a wrong choice is not, and a copy of a score is never a near-tie."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.methods.hybrid import channel_choices, page_scores
from kvc_trt.methods.rankings.rounding import truncated_share
from kvc_trt.methods.snapkv_plus_plus import window_scores
from tests.near_ties import compare_compaction, compare_selection


def golden_prompt() -> tuple[np.ndarray, np.ndarray]:
    """Return two heads, twelve keys; positions 7 and 8 have equal exact sums, which float32 may order either way."""
    keys = np.zeros((1, 1, 12, 2), np.float32)
    for position, key in {1: (3, 0), 4: (0, 3), 7: (2, 0), 8: (0, 2)}.items():
        keys[0, 0, position] = key
    q_window = np.zeros((1, 2, 2, 2), np.float32)
    q_window[0, 0], q_window[0, 1] = (2, 0), (0, 2)
    return q_window, keys


def compare_golden(kept: list[int]):
    q_window, keys = golden_prompt()
    expected = np.array([[[*range(8), 10, 11]]], np.int32)
    return compare_compaction(q_window, keys, np.array([12]), expected, np.array([[kept]], np.int32), pool_kernel=3)


def test_prompt_scores_are_the_golden_ones():
    q_window, keys = golden_prompt()
    scores = window_scores(np.float64(q_window[0]), np.float64(keys[0, 0]), 3)
    assert scores.pooled[:6] == pytest.approx([1.470537] * 6, abs=1e-6)
    assert scores.pooled[6:] == pytest.approx([0.373279] * 4, abs=1e-6)


def test_equal_lists_are_not_counted_as_near_ties():
    result = compare_golden([*range(8), 10, 11])
    assert (result.compared, result.near_ties, result.wrong) == (1, 0, ())


def test_equal_maxima_of_different_positions_are_a_near_tie():
    result = compare_golden([0, 1, 2, 3, 4, 5, 7, 8, 10, 11])
    assert (result.near_ties, result.swapped_tokens, result.wrong) == (1, 1, ())


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ([0, 1, 2, 3, 4, 5, 8, 9, 10, 11], "lower index wins"),  # 9 pools a subset of what 7 pools
        ([0, 1, 2, 3, 4, 6, 7, 8, 10, 11], "differ by"),
        ([*range(10)], "window must be kept"),
        ([*range(7), 10, 11, -1], "9 tokens, expected 10"),
        ([1, 0, 2, 3, 4, 5, 6, 7, 10, 11], "not ascending"),
        ([*range(7), 10, 11, 12], "of a prompt of 12"),
    ],
)
def test_wrong_compaction_is_refused(kept: list[int], reason: str):
    result = compare_golden(kept)
    assert result.near_ties == 0
    assert reason in result.wrong[0]


def golden_step() -> tuple[np.ndarray, np.ndarray]:
    query = np.array([[[4, -1, 0, 2], [2, -1, 0, -4]]], np.float32)
    rows = [(1, 0, 0, 0), (0, 1, 0, 0), (2, 0, 1, 1), (3, 0, 0, -1), (0, 0, 2, 0), (1, 1, 0, 2), (2, -1, 0, 0)]
    return query, np.array([[rows]], np.float32)


def compare_golden_step(read: list[int]):
    query, keys = golden_step()
    expected = np.array([[[0, 3, 4, 5]]], np.int32)
    actual = np.array([[read]], np.int32)
    return compare_selection(query, keys, np.array([7]), expected, actual, page_size=3, top_r=2)


def test_page_scores_are_the_golden_ones():
    query, keys = golden_step()
    choice = next(channel_choices(np.float64(query[0]), 2))
    assert choice.channels.tolist() == [0, 3]
    scores = page_scores(np.float64(query[0]), np.float64(keys[0, 0]), 3, choice)
    assert scores.token_weight == pytest.approx([0.045157, 0.273124, 0.045157], abs=1e-6)


def test_pages_with_equal_scores_are_a_near_tie():
    result = compare_golden_step([3, 4, 5, 6])
    assert (result.near_ties, result.wrong) == (1, ())


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        ([1, 3, 4, 5], "lowest tokens"),
        ([0, 1, 2, 3], "differ by"),
        ([0, 3, 4, 6], "at most one may be"),
        ([0, 3, 4, 9], "of 7 stored"),
        ([3, 4, 5, -1], "3 tokens, expected 4"),
    ],
)
def test_wrong_selection_is_refused(read: list[int], reason: str):
    result = compare_golden_step(read)
    assert result.near_ties == 0
    assert reason in result.wrong[0]


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        ([0, 3, 4, 5], "the last 2 tokens are read in any case, and [6] of them are not"),
        ([0, 1, 5, 6], "float64 scores differ"),
        ([2, 4, 5, 6], "did not give its lowest tokens"),
    ],
)
def test_last_tokens_do_not_compete(read: list[int], reason: str):
    """Among the others page 1 is the best, and its token that is read in any case takes no place of theirs."""
    query, keys = golden_step()
    lists = (np.array([[[3, 4, 5, 6]]], np.int32), np.array([[read]], np.int32))
    found = compare_selection(query, keys, np.array([7]), *lists, page_size=3, top_r=2, recent=2)
    assert found.near_ties == 0
    assert reason in found.wrong[0]


def test_two_cut_pages_are_refused():
    keys = np.ones((1, 1, 9, 4), np.float32)
    query = np.ones((1, 1, 4), np.float32)
    read = np.array([[[0, 1, 3, 4]]])
    result = compare_selection(query, keys, np.array([9]), np.array([[[0, 1, 2, 3]]]), read, page_size=3, top_r=2)
    assert "at most one" in result.wrong[0]


def test_a_copied_page_is_not_a_near_tie():
    """Equal content scores equally under any summation order, so the lower page must be taken."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((1, 1, 12, 8)).astype(np.float32)
    keys[0, 0, 8:12] = keys[0, 0, 4:8] = np.abs(keys[0, 0, 4:8]) + 4
    query = np.abs(rng.standard_normal((1, 2, 8)).astype(np.float32))
    lower, higher = np.array([[[4, 5, 6, 7]]]), np.array([[[8, 9, 10, 11]]])
    shape = {"page_size": 4, "top_r": 3}
    assert "exact copies" in compare_selection(query, keys, np.array([12]), lower, higher, **shape).wrong[0]
    assert compare_selection(query, keys, np.array([12]), lower, lower, **shape).wrong == ()


def test_a_channel_near_tie_is_followed():
    """Channels 0 and 1 weigh the same to one part in 10^7: pages may be scored by either, and by no third one."""
    query = np.array([[[1.0, 1.0000001, 0.5]]], np.float32)
    keys = np.zeros((1, 1, 3, 3), np.float32)
    keys[0, 0] = np.eye(3) * 9
    result = {
        token: compare_selection(
            query, keys, np.array([3]), np.array([[[1]]]), np.array([[[token]]]), page_size=1, top_r=1
        )
        for token in range(3)
    }
    assert (result[0].near_ties, result[0].wrong) == (1, ())
    assert (result[1].near_ties, result[1].wrong) == (0, ())
    assert result[2].wrong


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    group=st.sampled_from([1, 2, 4]),
    page_size=st.integers(1, 5),
    length=st.integers(9, 40),
)
def test_the_exact_choice_passes_and_its_worst_swap_is_refused(seed: int, group: int, page_size: int, length: int):
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((1, group, 8)).astype(np.float32)
    keys = rng.standard_normal((1, 1, length, 8)).astype(np.float32)
    choice = next(channel_choices(np.float64(query[0]), 5))
    scores = page_scores(np.float64(query[0]), np.float64(keys[0, 0]), page_size, choice)
    weight = np.repeat(scores.token_weight, page_size)
    order = np.lexsort((np.arange(length), -weight[:length]))
    best = np.sort(order[:6])
    shape = {"page_size": page_size, "top_r": 5}
    worst_page = order[-1] // page_size
    swapped = np.sort([*order[1:6], worst_page * page_size])

    same = compare_selection(query, keys, np.array([length]), best[None, None], best[None, None], **shape)
    assert same.wrong == ()
    if worst_page != order[5] // page_size:
        wrong = compare_selection(query, keys, np.array([length]), best[None, None], swapped[None, None], **shape)
        assert wrong.wrong


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pool_kernel=st.sampled_from([1, 3, 7]), length=st.integers(12, 60))
def test_float32_rounding_is_admitted_in_compaction(seed: int, pool_kernel: int, length: int):
    """Whatever float32 with another summation order keeps is the exact choice or a near-tie of it."""
    rng = np.random.default_rng(seed)
    q_window = rng.standard_normal((1, 2, 4, 8)).astype(np.float32)
    keys = np.round(rng.standard_normal((1, 1, length, 8)) * 2).astype(np.float32) / 2
    scores = window_scores(np.float64(q_window[0]), np.float64(keys[0, 0]), pool_kernel)
    noise = 1 + 1e-8 * rng.standard_normal(length - 4)
    summed = scores.summed * noise
    padded = np.pad(summed, pool_kernel // 2, constant_values=-np.inf)
    pooled = np.lib.stride_tricks.sliding_window_view(padded, pool_kernel).max(-1)

    def kept(values: np.ndarray) -> np.ndarray:
        best = np.lexsort((np.arange(values.size), -values))[:6]
        return np.concatenate([np.sort(best), np.arange(length - 4, length)])[None, None]

    result = compare_compaction(
        q_window, keys, np.array([length]), kept(scores.pooled), kept(pooled), pool_kernel=pool_kernel
    )
    assert result.wrong == ()


def cut(value: float, exponent: int) -> float:
    """`value` without the part below the last of the 24 bits of a number of that exponent (as `math.frexp` has it)."""
    return math.ldexp(math.trunc(math.ldexp(value, 24 - exponent)), exponent - 24)


def tensor_core_sum(products: np.ndarray, at_a_time: int) -> float:
    """Return the sum as tensor cores without extra bits make it, in exact arithmetic on doubles."""
    total = 0.0
    for first in range(0, len(products), at_a_time):
        terms = [total, *products[first : first + at_a_time].tolist()]
        largest = max(math.frexp(term)[1] for term in terms if term) if any(terms) else 0
        total = math.fsum(cut(term, largest) for term in terms)
        total = cut(total, math.frexp(total)[1])
    return total


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([8, 24, 64, 128, 256]), spread=st.integers(0, 30))
def test_tensor_cores_lose_at_most_the_share_of_the_bound(seed: int, size: int, spread: int):
    rng = np.random.default_rng(seed)
    query, key = (rng.standard_normal(size).astype(np.float16).astype(np.float64) for _ in range(2))
    products = query * key * np.exp2(-rng.integers(0, spread + 1, size).astype(np.float64))
    for at_a_time in (8, 16):
        lost = abs(tensor_core_sum(products, at_a_time) - math.fsum(products))
        assert lost <= truncated_share(size) * np.abs(products).sum()


@pytest.mark.parametrize("at_a_time", [8, 16])
def test_the_bound_is_of_the_size_that_tensor_cores_reach(at_a_time: int):
    """After a product of 1, every one just below 2^-23 is cut to nothing, which float32 would not lose."""
    products = np.array([1.0, *[2.0**-23 * (1 - 2.0**-11)] * 127])
    lost = abs(tensor_core_sum(products, at_a_time) - math.fsum(products)) / products.sum()
    assert 0.75 * truncated_share(128) <= lost <= truncated_share(128)
    assert lost > 10 * 2.0**-20


def test_truncation_is_admitted_where_tensor_cores_are():
    """Two keys whose exact scores differ by a tenth of the share that tensor cores may cut off: more than rounding."""
    query = np.full((1, 1, 128), 4.0, np.float32)
    keys = np.ones((1, 1, 2, 128), np.float32)
    share = 4 * truncated_share(128) * 4 * 128 / np.sqrt(128)
    keys[0, 0, 1, 0] += share / 10 / 4 * np.sqrt(128)
    right, other = np.array([[[1]]]), np.array([[[0]]])
    shape = {"page_size": 1, "top_r": 128}
    strict = compare_selection(query, keys, np.array([2]), right, other, **shape)
    assert "differ by" in strict.wrong[0]
    admitted = compare_selection(query, keys, np.array([2]), right, other, **shape, truncates=True)
    assert (admitted.near_ties, admitted.wrong) == (1, ())
    keys[0, 0, 1, 0] += 20 * share / 4 * np.sqrt(128)
    assert compare_selection(query, keys, np.array([2]), right, other, **shape, truncates=True).wrong


def test_pages_with_equal_fp8_bounds_tie_exactly():
    """1.1 and 1.2 are 1.25 rounded up, and 1.0 rounded down: keys differ, bounds do not, and the lower page wins."""
    query, keys = np.ones((1, 1, 4), np.float32), np.zeros((1, 1, 9, 4), np.float32)
    keys[0, 0, 0:3], keys[0, 0, 3:6] = 1.1, 1.2
    lower, higher = np.array([[[0, 1, 2]]]), np.array([[[3, 4, 5]]])
    shape = {"page_size": 3, "top_r": 4}
    assert compare_selection(query, keys, np.array([9]), higher, higher, **shape).wrong == ()
    found = compare_selection(query, keys, np.array([9]), lower, higher, **shape, fp8_bounds=True)
    assert "exact copies" in found.wrong[0]
    assert "differ by" in compare_selection(query, keys, np.array([9]), higher, lower, **shape).wrong[0]
