"""Any rounding within its bound leaves a score in its range; and a range refuses scores outside of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.methods.expected_attention import expected_scores
from kvc_trt.methods.hybrid import ByPages, possible_choices
from kvc_trt.methods.keydiff import ByDirection
from kvc_trt.methods.quest import ByPageBounds
from kvc_trt.methods.rankings.channels import MOST_CHANNEL_CHOICES, possible_channels
from kvc_trt.methods.rankings.rounding import BoundedScores, slack_of_truncation, truncated_share
from kvc_trt.methods.sparq import ByChannels
from kvc_trt.reference.methods import hybrid
from kvc_trt.reference.methods.expected_attention import expected_attention
from kvc_trt.reference.methods.keydiff import distinctness
from kvc_trt.reference.methods.quest import page_scores
from kvc_trt.reference.methods.sparq import row_scores

torch = pytest.importorskip("torch")

SLACK = 4096.0
"""The slack of fp16; the bound's first order has to hold there too."""
OFF = SLACK * 2.0**-22
"""The most by which a vector may be off, relative to its length."""
BOUNDS = ("full", "fp8", "fp8, of fp8 keys")
"""A key that is an fp8 number moves its bound by a whole step as soon as it moves."""
CASES = {
    "seed": st.integers(0, 2**32 - 1),
    "group": st.sampled_from([1, 2, 4]),
    "length": st.integers(6, 40),
    "scale": st.sampled_from([0.3, 1.0, 4.0]),
}


def moved(rng: np.random.Generator, vectors: np.ndarray, towards: np.ndarray | None = None) -> np.ndarray:
    """Vectors [..., D] off by as much as they may be: in random directions, or along `towards` [D] if it has one."""
    step = rng.standard_normal(vectors.shape) if towards is None else np.broadcast_to(towards, vectors.shape)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    norms = np.linalg.norm(step, axis=-1, keepdims=True)
    return vectors + OFF * lengths * step / np.where(norms > 0, norms, 1)


def assert_within(scores: BoundedScores, found: np.ndarray) -> None:
    """Asserts the bound to first order: a product of two moves, 2^-10 of one of them in fp16, is left out of it."""
    slip = 1e-12 + 1e-9 * np.abs(scores.value) + OFF * (scores.high - scores.low) / 2
    assert (scores.low <= scores.value).all()
    assert (scores.value <= scores.high).all()
    assert (found >= scores.low - slip).all(), (scores.low - found).max()
    assert (found <= scores.high + slip).all(), (found - scores.high).max()


def tensors(*arrays: np.ndarray) -> list:
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_rounded_keydiff_scores_stay_in_range(seed, group, length, scale):
    rng = np.random.default_rng(seed)
    keys = scale * rng.standard_normal((length, 8)) + rng.standard_normal(8) * group
    scores = ByDirection().scores(keys, SLACK)
    np.testing.assert_allclose(scores.value, distinctness(*tensors(keys[None]))[0].numpy(), atol=1e-12)
    for towards in (None, keys.mean(0)):
        assert_within(scores, distinctness(*tensors(moved(rng, keys, towards)[None]))[0].numpy())


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_rounded_expected_attention_scores_stay_in_range(seed, group, length, scale):
    """The queries move too, each by its own rounding, and mean and covariance follow from them."""
    rng = np.random.default_rng(seed)
    queries = scale * rng.standard_normal((group, 30, 8)) + rng.standard_normal((group, 1, 8))
    keys, values = scale * rng.standard_normal((length, 8)), rng.standard_normal((length, 8))

    def scored(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        mean, centred = queries.mean(1), queries - queries.mean(1, keepdims=True)
        covariance = centred.swapaxes(1, 2) @ centred / queries.shape[1]
        found = expected_attention(
            *tensors(mean, covariance, keys[None], values[None]), use_value_norm=True, epsilon=0.0
        )
        return found[0].numpy()

    mean, centred = queries.mean(1), queries - queries.mean(1, keepdims=True)
    scores = expected_scores(mean, centred.swapaxes(1, 2) @ centred / 30, keys, values, SLACK)
    np.testing.assert_allclose(scores.value, scored(queries, keys, values), rtol=1e-9)
    for towards in (None, queries[0, 0]):
        assert_within(scores, scored(moved(rng, queries, towards), moved(rng, keys, towards), moved(rng, values)))


@settings(max_examples=40, deadline=None)
@given(**CASES, top_r=st.integers(1, 8))
def test_rounded_sparq_scores_stay_in_range(seed, group, length, scale, top_r):
    rng = np.random.default_rng(seed)
    query, keys = scale * rng.standard_normal((group, 8)), rng.standard_normal((length, 8))
    found = row_scores(*tensors(query, keys[None]), top_r=top_r)
    channels = found.channels[0].numpy()
    scores = ByChannels(top_r).scores(query, keys, channels, SLACK)
    np.testing.assert_allclose(scores.value, found.tokens[0].numpy(), atol=1e-12)
    for towards in (None, query[0]):
        other = tensors(moved(rng, query), moved(rng, keys, towards)[None])
        again = row_scores(*other, top_r=top_r, channels=found.channels).tokens[0].numpy()
        assert_within(scores, again)


@settings(max_examples=40, deadline=None)
@given(**CASES, page_size=st.integers(1, 5), bounds_in=st.sampled_from(BOUNDS))
def test_rounded_quest_page_scores_stay_in_range(seed, group, length, scale, page_size, bounds_in):
    rng = np.random.default_rng(seed)
    query, keys = scale * rng.standard_normal(8), rng.standard_normal((length, 8)) * group
    pages = ByPageBounds(page_size, bounds_in != "full")
    keys = np.round(2 * keys) / 2 if bounds_in == "fp8, of fp8 keys" else keys

    def scored(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
        query, keys = tensors(query[None], keys[None, None])
        bounds = reference.page_bounds(keys, torch.tensor([length]), page_size, fp8=pages.fp8_bounds)
        return page_scores(query, length, *(table[0] for table in bounds), page_size=page_size)[0].numpy()

    scores = pages.scores(query, keys, SLACK)
    np.testing.assert_allclose(scores.value, scored(query, keys), atol=1e-12)
    for towards in (None, query):
        assert_within(scores, scored(moved(rng, query), moved(rng, keys, towards)))


@settings(max_examples=60, deadline=None)
@given(**CASES, page_size=st.integers(1, 5), top_r=st.integers(1, 8), bounds_in=st.sampled_from(BOUNDS))
def test_rounded_hybrid_scores_stay_in_range(seed, group, length, scale, page_size, top_r, bounds_in):
    """A moved query's choice is among the possible choices, and its scores of moved keys are in their range."""
    rng = np.random.default_rng(seed)
    query, keys = scale * rng.standard_normal((group, 8)), scale * rng.standard_normal((length, 8))
    pages = ByPages(page_size, top_r, bounds_in != "full")
    keys = np.round(2 * keys) / 2 if bounds_in == "fp8, of fp8 keys" else keys

    def scored(query: np.ndarray, keys: np.ndarray) -> hybrid.StepScores:
        moved_query, moved_keys = tensors(query, keys[None, None])
        bounds = reference.page_bounds(moved_keys, torch.tensor([length]), page_size, fp8=pages.fp8_bounds)
        return hybrid.row_scores(moved_query, length, *(table[0] for table in bounds), page_size=page_size, top_r=top_r)

    exact = next(possible_choices(query, top_r, SLACK))
    value = pages.scores(query, keys, exact, SLACK).value
    np.testing.assert_allclose(value, scored(query, keys).tokens[0].numpy(), rtol=1e-9)
    choices = list(possible_choices(query, top_r, SLACK))
    for towards in (None, query[0], -query[0]):
        other = moved(rng, query, None if towards is None else keys[0])
        found = scored(other, moved(rng, keys, towards))
        channels = np.sort(found.channels[0].numpy())
        taken = other[:, channels].sum(0) > 0
        (choice,) = (
            one for one in choices if np.array_equal(one.channels, channels) and np.array_equal(one.take_maximum, taken)
        )
        assert_within(pages.scores(query, keys, choice, SLACK), found.tokens[0].numpy())


def test_keys_that_each_move_another_channels_maximum_stay_in_range():
    """Together the keys move the first page's bounds twice as far as one of them could, along the query."""
    query, keys = np.full((1, 4), 3.0), np.concatenate([8 * np.eye(4), 8 * np.eye(4), -np.eye(4)])
    choice = next(possible_choices(query, 4, SLACK))
    scores = ByPages(4, 4).scores(query, keys, choice, SLACK)
    keys[:4] *= 1 + OFF
    bounds = (table[0] for table in reference.page_bounds(*tensors(keys[None, None]), torch.tensor([12]), 4))
    found = hybrid.row_scores(*tensors(query), 12, *bounds, page_size=4, top_r=4).tokens[0].numpy()
    by_one_key = OFF * 8 * np.linalg.norm(query) / 2 / 2  # over the temperature; half of the attention moves as much
    assert np.log(found[0] / scores.value[0]) > 1.9 * by_one_key
    assert_within(scores, found)


def test_equal_keys_that_each_move_on_another_channel_stay_in_range():
    """The corner of Quest's page is as long as each of the keys, and moves twice as far as one of them."""
    query, keys = np.full(4, 3.0), np.full((4, 4), 8.0)
    scores = ByPageBounds(4).scores(query, keys, SLACK)
    keys += OFF * np.linalg.norm(keys[0]) * np.eye(4)
    query *= 1 + OFF
    assert_within(scores, np.array([query @ keys.max(0)]))


@settings(max_examples=40, deadline=None)
@given(**CASES, page_size=st.integers(1, 5))
def test_sums_truncated_by_tensor_cores_stay_in_range(seed, group, length, scale, page_size):
    """Each logit loses all that it may: what both, query and keys, are given exactly."""
    rng = np.random.default_rng(seed)
    query, keys = scale * rng.standard_normal((group, 8)), scale * rng.standard_normal((length, 8))
    slack = slack_of_truncation(8)
    choice = next(possible_choices(query, 5, slack))
    starts = np.arange(0, length, page_size)
    used = keys[:, choice.channels]
    bound = np.where(choice.take_maximum, np.maximum.reduceat(used, starts), np.minimum.reduceat(used, starts))
    found = np.zeros(len(starts))
    for q in query:
        part = q[choice.channels]
        temperature = np.sqrt(8 * np.abs(part).sum() / np.abs(q).sum())
        lost = truncated_share(8) * (np.abs(bound) @ np.abs(part)) * rng.choice([-1, 0, 1], len(starts))
        logits = (bound @ part + lost) / temperature
        weights = np.exp(logits - logits.max())
        found += weights / (weights @ np.minimum(page_size, length - starts)) / group
    tokens = np.repeat(found, page_size)[:length]
    assert_within(ByPages(page_size, 5).scores(query, keys, choice, slack), tokens)


def test_channels_that_rounding_cannot_swap_are_not_tried():
    """The last of three channels weighs 1: another replaces it only from nearby, measured by the query's length."""
    query = np.array([[9.0, 9.0, 1.0, 0.9, 0.5, 0.1]])
    assert [one.tolist() for one in possible_channels(query, 3, SLACK)] == [[0, 1, 2]]
    query[0, 3] = 1 - 0.9 * np.sqrt(2) * OFF * np.linalg.norm(query)
    assert [one.tolist() for one in possible_channels(query, 3, SLACK)] == [[0, 1, 2], [0, 1, 3]]
    assert [one.tolist() for one in possible_channels(query, 3, SLACK / 2)] == [[0, 1, 2]]


def test_possible_channels_are_limited_where_all_tie():
    every = list(possible_channels(np.ones((1, 5)), 5, SLACK))
    assert [one.tolist() for one in every] == [[0, 1, 2, 3, 4]]
    tied = list(possible_channels(np.zeros((2, 64)), 32, SLACK))
    assert (len(tied), tied[0].tolist()) == (MOST_CHANNEL_CHOICES, list(range(32)))


def test_only_swaps_within_the_slack_are_explained():
    scores = BoundedScores.within(np.array([5.0, 3.0, 2.9, 1.0]), np.array([0.1, 0.1, 0.1, 0.1]))
    assert scores.unexplained(np.array([0, 1])) is None
    assert scores.unexplained(np.array([0, 2])) is None
    assert scores.unexplained(np.array([1, 2])) == "float64 scores differ by 2.1e+00, a near-tie allows 2.0e-01"
    assert scores.unexplained(np.arange(4)) is None
    assert scores.without_last().unexplained(np.arange(3)) is None


def test_a_certain_token_must_be_listed_beside_uncertain_ones():
    """2 may be anything, so it may be taken; but not together with 1 in place of 0."""
    scores = BoundedScores.within(np.array([5.0, 4.0, 1.0]), np.array([0.0, 0.0, 9.0]))
    assert scores.unexplained(np.array([0, 2])) is None
    assert scores.unexplained(np.array([1, 2])) is not None
