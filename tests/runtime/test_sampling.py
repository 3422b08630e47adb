from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.runtime import Sampling
from kvc_trt.runtime.sampling.sampler import Sampler, candidates

LOGITS = st.lists(st.sampled_from([-30.0, -1.0, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.float32)
)


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@given(LOGITS)
def test_greedy_takes_the_lowest_id_among_equals(logits):
    assert Sampler(Sampling()).choose(logits) == logits.tolist().index(logits.max())


@given(LOGITS, st.integers(1, 50))
def test_top_k_keeps_the_best_with_the_lowest_ids_among_equals(logits, top_k):
    ids, probabilities = candidates(logits, Sampling(temperature=0.7, top_k=top_k))
    best = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    assert ids.tolist() == sorted(best)
    np.testing.assert_allclose(probabilities, softmax(logits[ids].astype(np.float64) / 0.7), rtol=1e-12)


@given(LOGITS, st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999]), st.sampled_from([0, 3]))
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits, top_p, top_k):
    sampling = Sampling(temperature=1.3, top_k=top_k, top_p=top_p)
    ids, _ = candidates(logits, sampling)
    kept, probabilities = candidates(logits, Sampling(temperature=1.3, top_k=top_k))
    order = sorted(range(len(kept)), key=lambda i: (-probabilities[i], i))
    expected, mass = [], 0.0
    for i in order:
        expected.append(int(kept[i]))
        mass += probabilities[i]
        if mass >= top_p * (1 - 1e-12):
            break
    # A set whose mass is top_p up to rounding may have one more member.
    assert ids.tolist()[: len(expected)] == expected
    assert len(ids) <= len(expected) + 1


@given(LOGITS, st.sampled_from([0.01, 0.3, 0.6, 1.0]), st.sampled_from([0, 3]), st.sampled_from([1.0, 0.9]))
def test_the_sampler_keeps_the_candidates_of_transformers(logits, min_p, top_k, top_p):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = logits + np.linspace(0, 0.01, len(logits), dtype=np.float32)  # transformers breaks no ties
    warpers = [TemperatureLogitsWarper(0.7), *([TopKLogitsWarper(top_k)] if top_k else []), TopPLogitsWarper(top_p)]
    left = LogitsProcessorList([*warpers, MinPLogitsWarper(min_p)])(None, torch.from_numpy(logits).double()[None])[0]
    ids, probabilities = candidates(logits, Sampling(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p))
    assert set(ids.tolist()) == set(torch.isfinite(left).nonzero().flatten().tolist())
    expected = torch.softmax(left, -1)[torch.from_numpy(ids)].numpy()
    np.testing.assert_allclose(probabilities / probabilities.sum(), expected, rtol=1e-9)


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    sampler = Sampler(Sampling(temperature=1.0, seed=0))
    counts = np.bincount([sampler.choose(logits) for _ in range(4000)], minlength=4)
    assert counts / 4000 == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)


def test_a_tiny_temperature_is_greedy_and_overflows_nothing():
    logits = np.array([1.0, 3e38, -3e38, 2.0], np.float32)
    with np.errstate(all="raise", under="ignore"):
        assert Sampler(Sampling(temperature=1e-30, seed=1)).choose(logits) == 1


def test_minus_infinity_is_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], np.float32)
    sampler = Sampler(Sampling(temperature=2.0, top_p=0.99, seed=1))
    assert {sampler.choose(logits) for _ in range(100)} == {1, 3}


def test_equal_seeds_draw_equal_tokens():
    logits = np.zeros(1000, np.float32)

    def draw(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.choose(logits) for _ in range(20)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature must be a finite number >= 0, found -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top-k must be >= 0"),
        ({"top_p": 0.0}, r"top-p must be in \(0, 1\], found 0.0"),
        ({"top_p": 1.1}, "top-p"),
        ({"seed": -1}, r"seed is -1, expected an integer from 0 to 2\^64 - 1"),
        ({"repetition_penalty": 0.0}, "repetition penalty must be from 0.01 to 100, found 0.0"),
        ({"repetition_penalty": float("nan")}, "repetition penalty"),
        ({"presence_penalty": 2.1}, "presence penalty must be from -2 to 2, found 2.1"),
        ({"frequency_penalty": float("-inf")}, "frequency penalty is -inf, expected a finite number"),
        ({"min_p": 1.5}, "min-p must be from 0 to 1, found 1.5"),
        ({"min_p": -0.1}, "min-p"),
    ],
)
def test_invalid_settings_are_refused_by_name(arguments, message):
    with pytest.raises(InputError, match=message):
        Sampling(**arguments)
