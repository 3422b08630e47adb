"""Means, their errors, and differences on the same questions."""

from __future__ import annotations

import pytest

from kvc_trt.accuracy.cell import interval, mean, on_answered, paired_difference


def test_standard_error_of_a_mean_is_the_sample_estimate():
    assert str(mean([1.0] * 75 + [0.0] * 25)) == "75.0 ± 4.4"
    assert mean([1.0, 2.0]).standard_error == 0.5
    assert mean([1.0]).standard_error == 0


def test_partial_scores_vary_less_than_right_and_wrong_ones():
    assert mean([0.25, 0.75] * 50).standard_error < mean([0.0, 1.0] * 50).standard_error


def test_a_mean_of_no_scores_is_refused():
    with pytest.raises(ValueError, match="found none"):
        mean([])


@pytest.mark.parametrize(("value", "low", "high"), [(0.0, 0.0, 0.0713), (1.0, 0.9287, 1.0), (0.5, 0.3664, 0.6336)])
def test_interval_is_wilsons_score_interval(value: float, low: float, high: float):
    assert interval(value, 50) == pytest.approx((low, high), abs=1e-3)


def test_questions_hard_for_both_do_not_widen_the_difference():
    first, second = [1.0, 0.0] * 20, [1.0, 0.0] * 19 + [0.0, 0.0]
    difference = paired_difference(first, second)
    assert difference.value == pytest.approx(1 / 40)
    assert difference.standard_error < mean(first).standard_error / 2


def test_scores_of_different_questions_are_not_compared():
    with pytest.raises(ValueError, match="same questions"):
        paired_difference([1.0], [1.0, 0.0])


def test_only_questions_that_the_full_cache_answers_count():
    full = (1.0, 0.5, 1.0, 1.0)
    found = on_answered((1.0, 1.0, 0.0, 0.5), full)
    assert found is not None
    assert (found.value, found.samples) == (0.5, 3)
    assert on_answered(full, full).value == 1
    assert on_answered((1.0, 1.0), (0.0, 0.5)) is None


def test_cells_cut_short_are_judged_on_their_answers():
    found = on_answered((0.0, 0.0), (1.0, 0.0, 1.0))
    assert (found.value, found.samples) == (0.0, 1)
