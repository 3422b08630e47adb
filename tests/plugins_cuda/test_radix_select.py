"""kernels/radix_select.cuh: exact selection by total weight under the tie rule, in every schedule of the emulation."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from kvc_trt.reference.selection import best_ascending
from tests.plugins_cuda.toys import SCHEDULES, aligned, toys

THREADS = (64, 256, 1024)
IN_REGISTERS = (4, 8, 16)
"""Keys that a thread may hold."""
ALL_PASSES = -1
WIDE = 0
"""In place of the number of threads: the selection in clusters, by 256 threads and digits of 11 bits."""
MOST_WIDE = 8192
"""Values that it takes."""
INT32 = np.iinfo(np.int32)


def select(
    values: NDArray[np.float32],
    quota: int,
    weights: NDArray[np.int32] | None = None,
    *,
    threads: int = 256,
    in_registers: int = 0,
    single: int = 0,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint32]]:
    """Return the weight that every element gets, the start of its output (-1: it has none), and the threshold.

    `in_registers` keys of each thread, or all of them in memory. Elements of weight `single`
    together are one element; ALL_PASSES runs every pass. `threads` may be WIDE.
    """
    n = len(values)
    weights = np.ones(n, np.int32) if weights is None else weights
    given_values, given_weights = aligned((n,), np.float32), aligned((n,), np.int32)
    given_values[...], given_weights[...] = values, weights
    slots, counts = aligned((n,), np.int32, -1), aligned((n,), np.int32)
    threshold = aligned((3,), np.uint32)
    arrays = (given_values, given_weights, n, quota, single, threshold, slots, counts)
    if threads == WIDE:
        message = toys().run("wide_select", *arrays)
    else:
        message = toys().run("radix_select", threads, in_registers, *arrays)
    assert not message, message
    return counts, slots, threshold


def expected_counts(values: NDArray[np.float32], quota: int, weights: NDArray[np.int32]) -> NDArray[np.int64]:
    """The rule, one element after another: value descending (NaN last), index ascending, the last one in part."""
    ranked = np.where(np.isnan(values), np.float32(-np.inf), values)
    order = np.lexsort((np.arange(len(values)), np.isnan(values), -ranked))
    served = np.zeros(len(values), np.int64)
    left = max(quota, 0)
    for i in order:
        served[i] = min(left, weights[i])
        left -= served[i]
    return served


def check(values: NDArray[np.float32], quota: int, weights: NDArray[np.int32], threads: int) -> None:
    expected = expected_counts(values, quota, weights)
    starts = np.cumsum(expected) - expected
    heaviest = int(weights.max())
    alike = np.count_nonzero(weights < heaviest) <= 1 and weights.min() > 0  # as pages, one of them partial
    for in_registers in (0, *(keys for keys in IN_REGISTERS if len(values) <= keys * threads)):
        for single in (ALL_PASSES, 0, *([heaviest] if alike else [])):
            counts, slots, _ = select(
                values, quota, weights, threads=threads, in_registers=in_registers, single=single
            )  # fmt: skip
            np.testing.assert_array_equal(counts, expected)
            np.testing.assert_array_equal(slots, np.where(expected > 0, starts, -1))
    for single in (0, *([heaviest] if alike else [])) if len(values) <= MOST_WIDE else ():
        counts, slots, _ = select(values, quota, weights, threads=WIDE, single=single)
        np.testing.assert_array_equal(counts, expected)
        np.testing.assert_array_equal(slots, np.where(expected > 0, starts, -1))


@pytest.fixture(autouse=True)
def forward() -> None:
    toys().set_schedule("forward")


@pytest.mark.slow
@pytest.mark.parametrize("threads", THREADS)
def test_equal_values_are_served_by_index(threads: int) -> None:
    values = np.array([1, 3, 2, 3, 2, 2, 0, 2], np.float32)
    counts, slots, _ = select(values, 4, threads=threads)
    assert counts.tolist() == [0, 1, 1, 1, 1, 0, 0, 0]
    assert slots.tolist() == [-1, 0, 1, 2, 3, -1, -1, -1]


@pytest.mark.parametrize("threads", THREADS)
def test_the_last_tied_element_is_served_in_part(threads: int) -> None:
    values, weights = np.array([5, 1, 5, 1, 1], np.float32), np.array([3, 4, 2, 4, 4], np.int32)
    counts, slots, threshold = select(values, 11, weights, threads=threads)
    assert counts.tolist() == [3, 4, 2, 2, 0]
    assert slots.tolist() == [0, 3, 7, 9, -1]
    assert threshold.tolist() == [0x80000000 | np.float32(1).view(np.uint32), 6, 0xFFFFFFFF]


@pytest.mark.parametrize("threads", THREADS)
def test_passes_end_where_an_element_is_alone(threads: int) -> None:
    """The bits that set it apart are enough; so are those of elements that are all served."""
    values, weights = np.array([8, 1, 4.5, 4.25, 2, 8], np.float32), np.full(6, 3, np.int32)
    counts, _, threshold = select(values, 8, weights, threads=threads, single=3)
    assert (counts.tolist(), hex(threshold[2])) == ([3, 0, 2, 0, 0, 3], "0xffff0000")
    counts, _, threshold = select(values, 15, weights, threads=threads)
    assert (counts.tolist(), hex(threshold[2])) == ([3, 0, 3, 3, 3, 3], "0xff000000")


def test_wide_passes_end_where_an_element_is_alone() -> None:
    """The first digit has two bits of the fraction, the second 11 more, the last what is left."""
    values, weights = np.array([8, 1, 4.5, 4.25, 2, 8], np.float32), np.full(6, 3, np.int32)
    counts, _, threshold = select(values, 8, weights, threads=WIDE, single=3)
    assert (counts.tolist(), hex(threshold[2])) == ([3, 0, 2, 0, 0, 3], "0xfffffc00")
    counts, _, threshold = select(values, 10, weights, threads=WIDE, single=3)
    assert (counts.tolist(), hex(threshold[2])) == ([3, 0, 3, 1, 0, 3], "0xfffffc00")
    counts, _, threshold = select(values, 14, weights, threads=WIDE, single=3)
    assert (counts.tolist(), hex(threshold[2])) == ([3, 0, 3, 3, 2, 3], "0xffe00000")
    alike = np.array([1, np.nextafter(np.float32(1), np.float32(2)), 1], np.float32)
    counts, _, threshold = select(alike, 2, threads=WIDE, single=1)
    assert (counts.tolist(), hex(threshold[2])) == ([1, 1, 0], "0xffffffff")


@pytest.mark.parametrize(("quota", "served"), [(-3, 0), (0, 0), (1, 1), (6, 6), (7, 7), (8, 7), (INT32.max, 7)])
def test_a_quota_is_clamped_to_the_number_of_values(quota: int, served: int) -> None:
    values = np.array([np.nan, 0, -1, 4, 4, -np.inf, 2], np.float32)
    assert select(values, quota)[0].sum() == served


def test_special_values_are_ranked_with_nan_last() -> None:
    """NaN below -inf, -0 equal to 0, denormals apart from 0: one more is taken with every quota."""
    tiny = np.float32(1e-45)
    ranked = np.array([np.inf, 1, 2 * tiny, tiny, 0, -0.0, -tiny, -1, -np.inf, np.nan], np.float32)
    for order in (np.arange(10), np.arange(10)[::-1], np.random.default_rng(0).permutation(10)):
        values = ranked[order]
        for quota in range(11):
            expected = expected_counts(values, quota, np.ones(10, np.int32))
            np.testing.assert_array_equal(select(values, quota)[0], expected, f"quota {quota} of {values}")


def test_agrees_with_the_reference() -> None:
    make = torch.Generator().manual_seed(1)
    values = torch.randint(0, 40, (1, 2000), generator=make).float() / 7
    for k in (1, 31, 500, 1999, 2000):
        chosen = np.flatnonzero(select(values[0].numpy(), k, threads=1024)[0])
        np.testing.assert_array_equal(chosen, best_ascending(values, k)[0].numpy())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), n=st.integers(1, 700), threads=st.sampled_from(THREADS), distinct=st.sampled_from([1, 3, 50, 0]))
def test_random_values_are_selected_by_the_rule(data: st.DataObject, n: int, threads: int, distinct: int) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    any_bits = random.integers(0, 2**32, max(n, distinct), dtype=np.uint32).view(np.float32)
    values = any_bits[random.integers(0, distinct, n)] if distinct else any_bits[:n]
    pages = np.full(n, 3, np.int32)
    pages[-1] = random.integers(1, 4)
    weights = data.draw(
        st.one_of(st.just(np.ones(n, np.int32)), st.just(pages), arrays(np.int32, n, elements=st.integers(0, 7)))
    )
    quota = data.draw(st.integers(0, int(weights.sum()) + 2))
    check(values, quota, weights, threads)


@pytest.mark.slow
@pytest.mark.parametrize("n", [31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4096, 8191, 8192, 8193])
def test_lengths_around_warps_blocks_and_batches_follow_the_rule(n: int) -> None:
    values = (np.arange(n) * 7919 % 101).astype(np.float32)
    for threads in THREADS:
        for quota in (1, n // 3, n - 1, n):
            check(values, quota, np.ones(n, np.int32), threads)


def test_a_million_elements_follow_the_rule() -> None:
    """The largest size, on a plateau whose members are more than any digit's bin of a smaller type could count."""
    n = 1 << 20
    values = np.where(np.arange(n) % 3 == 0, np.float32(0.25), np.float32(0.125))
    quota = n // 3 + 1 + 70000
    counts, slots, _ = select(values, quota, threads=1024)
    chosen = np.flatnonzero(counts)
    small = np.flatnonzero(values == 0.125)[:70000]
    np.testing.assert_array_equal(chosen, np.sort(np.concatenate([np.flatnonzero(values == 0.25), small])))
    np.testing.assert_array_equal(slots[chosen], np.arange(quota))


def test_schedules_give_the_same_bits() -> None:
    random = np.random.default_rng(3)
    values = (random.integers(0, 60, 5000) / 8).astype(np.float32)
    weights = random.integers(0, 5, 5000).astype(np.int32)
    for threads, in_registers in ((64, 0), (256, 0), (1024, 0), (1024, 8), (WIDE, 0)):
        results = []
        for schedule in SCHEDULES:
            toys().set_schedule(schedule, seed=11)
            parts = select(values, 2500, weights, threads=threads, in_registers=in_registers)
            results.append(np.concatenate([part.view(np.int32) for part in parts]))
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])
