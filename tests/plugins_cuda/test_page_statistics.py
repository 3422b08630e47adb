"""kernels/page_statistics.cuh: maximum and sum of the softmax of page scores, against float64, in every schedule."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

from tests.plugins_cuda.toys import SCHEDULES, aligned, toys

UNIT = 8
"""Pages whose statistics one block computes: kUnitPages."""


def statistics(
    scores: NDArray[np.float32], page_size: int = 1, in_last: int = 1, threads: int = 512
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(maximum, sum) [g,U,2] of every unit of scores [g,P], and (maximum, 1 / sum) [g,2] of every head."""
    group, pages = scores.shape
    given_scores = aligned(scores.shape, np.float32)
    given_scores[...] = scores
    units, heads = aligned((group, -(-pages // UNIT), 2), np.float32), aligned((group, 2), np.float32)
    message = toys().run("page_statistics", threads, given_scores, group, pages, page_size, in_last, units, heads)
    assert not message, message
    return units, heads


def check_sum(found: NDArray[np.floating], scores: NDArray[np.float32], tokens: NDArray[np.int64]) -> None:
    """Asserts that (maximum, sum) of finite scores agrees with float64, up to the rounding of the exponents."""
    exact = scores.astype(np.float64)
    assert found[0] == exact.max()
    tolerance = 2.0**-20 * (1 + np.abs(exact).max())
    np.testing.assert_allclose(found[1], (tokens * np.exp(exact - exact.max())).sum(), rtol=tolerance)


@pytest.fixture(autouse=True)
def forward() -> None:
    toys().set_schedule("forward")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    group=st.integers(1, 16), pages=st.integers(1, 1200), page_size=st.integers(1, 9), seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 1.0, 30.0]), data=st.data(),
)  # fmt: skip
def test_sums_of_random_scores_equal_float64_to_rounding(
    group: int, pages: int, page_size: int, seed: int, spread: float, data: st.DataObject
) -> None:
    in_last = data.draw(st.integers(1, page_size))
    scores = (np.random.default_rng(seed).standard_normal((group, pages)) * spread).astype(np.float32)
    tokens = np.full(pages, page_size)
    tokens[-1] = in_last
    units, heads = statistics(scores, page_size, in_last)
    for head in range(group):
        check_sum(np.array([heads[head, 0], 1 / np.float64(heads[head, 1])]), scores[head], tokens)
        for unit in range(units.shape[1]):
            part = slice(unit * UNIT, (unit + 1) * UNIT)
            check_sum(units[head, unit], scores[head, part], tokens[part])


@pytest.mark.parametrize("pages", [8, 100, 2000])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_or_an_infinite_score_makes_its_head_nan(pages: int, value: float) -> None:
    for page in (0, 7, pages // 2, pages - 1):
        scores = np.zeros((3, pages), np.float32)
        scores[1, page] = value
        _, heads = statistics(scores)
        assert np.isnan(heads[:, 1]).tolist() == [False, True, False]
        assert heads[0].tolist() == heads[2].tolist() == [0, np.float32(1) / np.float32(pages)]


def test_minus_infinity_adds_nothing() -> None:
    """Neither alone nor as a whole unit; a NaN beside it still shows."""
    scores = np.full((3, 40), -np.inf, np.float32)
    scores[:2, 16:24] = 2.0
    scores[1, 3] = np.nan
    units, heads = statistics(scores, page_size=3, in_last=1)
    assert units[0, 0].tolist() == [-np.inf, 0]
    assert heads[0].tolist() == [2, np.float32(1) / np.float32(24)]
    assert np.isnan(heads[1, 1])
    assert heads[2].tolist() == [-np.inf, np.inf]


def test_exponentials_do_not_overflow() -> None:
    scores = np.array([[3e38, -3e38] + [1e38] * 20], np.float32)
    _, heads = statistics(scores)
    assert heads[0].tolist() == [np.float32(3e38), 1]


def test_equal_units_have_equal_bits_wherever_they_are() -> None:
    unit = np.random.default_rng(2).standard_normal(UNIT).astype(np.float32)
    units, _ = statistics(np.tile(unit, (2, 300)))
    assert len(np.unique(units.reshape(-1, 2), axis=0)) == 1


def test_schedules_give_the_same_bits() -> None:
    scores = np.random.default_rng(3).standard_normal((5, 1064)).astype(np.float32) * 4
    results = []
    for schedule in SCHEDULES:
        toys().set_schedule(schedule, seed=5)
        results.append(np.concatenate([part.ravel() for part in statistics(scores, 3, 2)]))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("pages", [1, 257, 1043, 4096])
def test_a_smaller_block_gets_the_same_bits(group: int, pages: int) -> None:
    """Uses as many parts in both: a cluster's block has half the threads of a block that selects alone."""
    scores = np.random.default_rng(pages).standard_normal((group, pages)).astype(np.float32)
    for found, wanted in zip(statistics(scores, threads=256), statistics(scores, threads=512), strict=True):
        assert np.array_equal(found.view(np.int32), wanted.view(np.int32))
