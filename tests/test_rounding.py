"""Differences that the tests accept as rounding, and differences that they do not."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.operators.fp8_bounds import EMPTY, codes_of
from tests.rounding import assert_close

LARGE = np.array([75.0, 0.01], np.float32)


@pytest.mark.parametrize("place", [0, 1])
def test_a_large_element_sets_the_bar_of_its_tensor(place: int) -> None:
    off = np.zeros(2, np.float32)
    off[place] = 1
    assert_close(LARGE + 7e-4 * off, LARGE)
    with pytest.raises(AssertionError):
        assert_close(LARGE + 8e-4 * off, LARGE)


def test_small_numbers_are_held_to_an_absolute_bar() -> None:
    assert_close([9e-6], [0.0])
    with pytest.raises(AssertionError):
        assert_close([1.1e-5], [0.0])


def test_bounds_of_pages_without_tokens_set_no_bar_and_are_equal() -> None:
    empty = -np.finfo(np.float32).max
    expected = np.array([1, empty], np.float32)
    assert_close(expected, expected)
    for wrong in ([1.1, empty], [1, 1]):
        with pytest.raises(AssertionError):
            assert_close(np.array(wrong, np.float32), expected)


def test_different_numbers_and_lengths_are_not_taken_for_rounding() -> None:
    with pytest.raises(AssertionError):
        assert_close(np.array([10**6 + 1]), np.array([10**6]))
    for wrong in ([np.nan, 0.01], [75.0], [np.inf, 0.01]):
        with pytest.raises(AssertionError):
            assert_close(np.array(wrong, np.float32), LARGE)
    assert_close([np.nan, 1.0], [np.nan, 1.0])


def test_fp8_bounds_may_be_of_numbers_that_differ_by_rounding() -> None:
    below, above = (codes_of(np.array([number, -1e9])) for number in (1.0, 1.0 + 1e-6))
    assert below[0] != above[0]
    assert above[1] == EMPTY
    assert_close(above, below)
    with pytest.raises(AssertionError):
        assert_close(codes_of(np.array([1.5, -1e9])), below)
