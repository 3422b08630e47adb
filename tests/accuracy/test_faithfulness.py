"""Divergence from the whole cache, by hand and on the shipped model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt.accuracy.faithfulness import bootstrap_interval, compare
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.under_test.answerer import mean_negative_log_likelihood
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.errors import InputError
from tests.accuracy.test_answerer import LENGTH, questions


def test_divergence_and_agreement_match_hand_computed_values():
    whole = np.log(np.array([[0.5, 0.5], [0.9, 0.1], [0.25, 0.75]], np.float32))
    other = np.log(np.array([[0.5, 0.5], [0.1, 0.9], [0.75, 0.25]], np.float32)) + 3  # logits need not be normalised
    found = compare(whole, other)
    second, third = 0.8 * np.log(9), 0.5 * np.log(3)
    assert found.divergence == pytest.approx((second + third) / 3, rel=1e-6)
    assert found.equal == pytest.approx(1 / 3)
    assert found.first_difference == 1
    same = compare(whole, whole)
    assert (same.divergence, same.equal, same.first_difference) == (0.0, 1.0, None)


def test_logits_of_other_tokens_are_refused():
    for whole, other in (((2, 3), (3, 3)), ((0, 3), (0, 3)), ((3,), (3,))):
        with pytest.raises(ValueError, match="expected logits"):
            compare(np.zeros(whole, np.float32), np.zeros(other, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_logits_are_refused_in_a_comparison(bad):
    whole, other = np.zeros((2, 3), np.float32), np.array([[0, 0, 0], [0, bad, 0]], np.float32)
    with pytest.raises(InputError, match="not finite at token 1"):
        compare(whole, other)


def test_a_bootstrap_interval_holds_the_mean_and_narrows_with_prompts():
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    low, high = bootstrap_interval(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    few = bootstrap_interval(values[:25])
    assert few[1] - few[0] > 3 * (high - low)
    assert bootstrap_interval([0.5]) == (0.5, 0.5)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval([])


@pytest.mark.parametrize("mode", ["query-aware", "query-agnostic"])
def test_caches_in_a_format_follow_the_whole_one_more_or_less_closely(tiny, key_value, mode):
    targets = ((150, 190), (151,), (160, 200, 210, 5))
    asked = questions(tiny, key_value, mode, samples=3).flat
    given = [replace(one, target_ids=target) for one, target in zip(asked, targets, strict=True)]
    room = Room(LENGTH - 5, 5 + 8)
    whole = tiny.open(Variant("full", None), room)
    expected = whole.along_targets(given)
    assert [len(one) for one in expected] == [2, 1, 4]
    likelihoods = [mean_negative_log_likelihood(*pair) for pair in zip(expected, targets, strict=True)]
    assert likelihoods == whole.surprise(given)
    mean = {}
    for form in ("int8", "fp8", "int4"):
        logits = tiny.open(Variant(f"full:kv_cache={form}", None), room).along_targets(given)
        mean[form] = np.mean([compare(*pair).divergence for pair in zip(expected, logits, strict=True)])
    assert 0 < mean["int8"] < mean["fp8"] < mean["int4"] < 1
