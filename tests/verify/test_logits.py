"""Figures of a difference, and which greedy tokens differ for a good reason."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.verify.rungs.logits import difference
from kvc_trt.verify.rungs.tokens import Greedy, match, shared_prefix


def logits(*rows: list[float]) -> np.ndarray:
    return np.array([[row] for row in rows], np.float32)


def test_equal_logits_have_no_error():
    same = logits([1, 2, 3], [0, 5, 1])
    found = difference(same, same, 1e-3)
    assert found.figures.max_logit_error == 0
    assert found.figures.mean_kl == pytest.approx(0, abs=1e-12)
    assert (found.figures.top1_agreement, found.figures.first_divergence) == (1.0, None)


def test_errors_are_relative_to_the_largest_logit():
    found = difference(logits([10.1, 0]), logits([10, 0]), 1e-3)
    assert found.figures.max_logit_error == pytest.approx(0.01, rel=1e-4)


def test_kl_is_that_of_the_distributions():
    found = difference(logits([0.0, 0.0]), logits([np.log(3.0), 0.0]), 1e-3)
    assert found.figures.mean_kl == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5), abs=1e-6)


def test_top1_differences_are_counted_by_their_gap():
    expected = logits([1, 1.0005, 0], [1, 2, 0], [3, 0, 0])
    found = difference(logits([1.0005, 1, 0], [2, 1, 0], [3, 0, 0]), expected, 1e-3)
    assert (found.near_equal, found.unexplained) == (1, 1)
    assert found.figures.first_divergence == 0
    assert found.figures.top1_agreement == pytest.approx(1 / 3)


def test_nan_is_the_worst_error():
    found = difference(logits([np.nan, 0]), logits([1, 0]), 1e-3)
    assert np.isnan(found.figures.max_logit_error)
    assert found.unexplained == 1


def greedy(tokens: list[int], seen: list[list[float]]) -> Greedy:
    return Greedy(np.array(tokens)[:, None], np.array(seen, np.float32)[:, None])


EXPECTED = greedy([1, 2, 0], [[0, 1, 0], [0, 0.9999, 1], [1, 0, 0]])


def test_a_row_is_compared_up_to_a_near_equal_difference():
    found = match([(1, 1, 2)], EXPECTED, 1e-3)
    assert (found.matched, found.compared, found.near_equal, found.unexplained) == (1, 1, 1, 0)


def test_an_unexplained_difference_counts_every_token_after_it():
    found = match([(1, 0, 0)], EXPECTED, 1e-3)
    assert (found.matched, found.compared, found.unexplained) == (1, 3, 1)
    assert found.rate == pytest.approx(1 / 3)


def test_a_difference_under_forced_choices_is_explained():
    forced = np.array([[[0, 1, 0]], [[3, 0, 0]], [[0, 0, 0]]], np.float32)
    found = match([(1, 0, 0)], EXPECTED, 1e-3, forced)
    assert (found.by_choice, found.unexplained, found.compared) == (1, 0, 1)


def test_the_shared_prefix_ends_at_the_first_difference():
    assert shared_prefix([(1, 2, 3), (4, 5, 6)], [(1, 2, 9), (0, 5, 6)]) == pytest.approx(2 / 6)
