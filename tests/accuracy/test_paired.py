"""A policy beside the full cache: on what the full cache answers, and question by question."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvc_trt.accuracy.paired import beside_full, on_answered
from tests.accuracy.cells import cell


def test_only_what_the_full_cache_answers_counts():
    full, mine = replace(cell("full"), scores=(1.0, 0.5, 1.0, 1.0)), replace(cell(), scores=(1.0, 1.0, 0.0, 0.5))
    found = on_answered(mine, full)
    assert (found.value, found.samples) == (0.5, 3)
    assert on_answered(full, full).value == 1
    assert on_answered(mine, replace(full, scores=(0.0, 0.5, 0.0, 0.0))) is None


def test_a_cell_that_was_cut_short_is_compared_as_far_as_it_goes():
    full, mine = replace(cell("full"), scores=(1.0, 0.0, 1.0)), replace(cell(), scores=(0.0, 0.0))
    assert (on_answered(mine, full).value, on_answered(mine, full).samples) == (0.0, 1)
    assert (beside_full(mine, full).value, beside_full(mine, full).samples) == (-0.5, 2)
    assert beside_full(replace(mine, scores=()), full) is None


def test_likelihoods_are_compared_and_not_counted():
    full, mine = (replace(cell(), scored_by="likelihood", scores=scores) for scores in ((1.5, 2.0), (2.0, 3.0)))
    assert on_answered(mine, full) is None
    difference = beside_full(mine, full)
    assert (difference.value, difference.standard_error) == (0.75, pytest.approx(0.25 / 2**0.5))
