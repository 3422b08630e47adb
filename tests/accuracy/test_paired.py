"""A policy beside the full cache: on what the full cache answers, and question by question."""

from __future__ import annotations

import pytest

from kvc_trt.accuracy.paired import difference, higher_and_lower, on_answered, sign_test


def test_only_what_the_full_cache_answers_counts():
    full = (1.0, 0.5, 1.0, 1.0)
    found = on_answered((1.0, 1.0, 0.0, 0.5), full)
    assert found is not None
    assert (found.value, found.samples) == (0.5, 3)
    assert on_answered(full, full).value == 1
    assert on_answered((1.0, 1.0), (0.0, 0.5)) is None


def test_what_was_cut_short_is_compared_as_far_as_it_goes():
    full, mine = (1.0, 0.0, 1.0), (0.0, 0.0)
    assert (on_answered(mine, full).value, on_answered(mine, full).samples) == (0.0, 1)
    assert (difference(mine, full).value, difference(mine, full).samples) == (-0.5, 2)
    assert difference((), full) is None


def test_a_difference_has_the_error_of_the_differences():
    found = difference((2.0, 3.0), (1.5, 2.0))
    assert (found.value, found.standard_error) == (0.75, pytest.approx(0.25 / 2**0.5))


def test_few_questions_show_nothing_however_alike_they_are():
    assert sign_test((1.0, 1.0), (0.0, 0.0)) == 0.5
    assert sign_test((1.0,) * 6, (0.0,) * 6) == 2 / 2**6
    assert sign_test((1.0, 0.0, 1.0), (0.0, 1.0, 1.0)) == 1.0
    assert sign_test((), ()) == 1.0
    assert sign_test((1.0,) * 9 + (0.0,), (0.0,) * 9 + (1.0,)) == pytest.approx(2 * 11 / 2**10)


def test_questions_are_counted_as_far_as_both_go():
    assert higher_and_lower((1.0, 0.0, 0.5, 1.0), (0.0, 1.0, 0.25)) == (2, 1)
