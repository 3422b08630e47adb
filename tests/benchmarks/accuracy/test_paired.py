"""Two methods question by question, and many such comparisons at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy.paired import difference, higher_and_lower, holm, sign_test


def test_cells_cut_short_are_compared_on_their_answers():
    full, mine = (1.0, 0.0, 1.0), (0.0, 0.0)
    assert (difference(mine, full).value, difference(mine, full).samples) == (-0.5, 2)
    assert difference((), full) is None


def test_a_difference_has_the_error_of_the_differences():
    found = difference((2.0, 3.0), (1.5, 2.0))
    assert (found.value, found.standard_error) == (0.75, pytest.approx(0.25))


def test_sign_test_has_exact_binomial_chances():
    assert sign_test((1.0, 1.0), (0.0, 0.0)) == 0.5
    assert sign_test((1.0,) * 6, (0.0,) * 6) == 2 / 2**6
    assert sign_test((1.0, 0.0, 1.0), (0.0, 1.0, 1.0)) == 1.0
    assert sign_test((), ()) == 1.0
    assert sign_test((1.0,) * 9 + (0.0,), (0.0,) * 9 + (1.0,)) == pytest.approx(2 * 11 / 2**10)


def test_only_questions_of_both_sides_are_counted():
    assert higher_and_lower((1.0, 0.0, 0.5, 1.0), (0.0, 1.0, 0.25)) == (2, 1)


def test_many_comparisons_need_smaller_chances():
    assert holm([]) == []
    assert holm([0.04]) == [0.04]
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1)))
def test_a_corrected_chance_is_never_smaller_and_keeps_the_order(chances: list[float]):
    adjusted = holm(chances)
    assert all(before <= after <= 1 for before, after in zip(chances, adjusted, strict=True))
    order = sorted(range(len(chances)), key=chances.__getitem__)
    assert [adjusted[place] for place in order] == sorted(adjusted)
