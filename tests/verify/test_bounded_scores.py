"""Whatever rounding does within its bound, a score stays in its range; and a range refuses what lies outside of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.reference.expected_attention import expected_attention
from kvc_trt.reference.keydiff import distinctness
from kvc_trt.reference.quest import page_scores
from kvc_trt.reference.sparq import row_scores
from kvc_trt.verify.bounded_scores import (
    BoundedScores,
    scores_by_direction,
    scores_by_expected_queries,
    scores_of_pages,
    scores_on_channels,
)

torch = pytest.importorskip("torch")

SLACK = 4096.0
"""That of fp16; the bound's first order has to hold there too."""
OFF = SLACK * 2.0**-22
"""By how much of its length a vector may be off."""
CASES = {
    "seed": st.integers(0, 2**32 - 1),
    "group": st.sampled_from([1, 2, 4]),
    "length": st.integers(6, 40),
    "scale": st.sampled_from([0.3, 1.0, 4.0]),
}


def moved(rng: np.random.Generator, vectors: np.ndarray, towards: np.ndarray | None = None) -> np.ndarray:
    """Vectors [..., D] off by as much as they may be, in random directions or along `towards` [D]."""
    step = rng.standard_normal(vectors.shape) if towards is None else np.broadcast_to(towards, vectors.shape)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors + OFF * lengths * step / np.linalg.norm(step, axis=-1, keepdims=True)


def assert_within(scores: BoundedScores, found: np.ndarray) -> None:
    slip = 1e-12 + 1e-9 * np.abs(scores.value)
    assert (scores.low <= scores.value).all()
    assert (scores.value <= scores.high).all()
    assert (found >= scores.low - slip).all(), (scores.low - found).max()
    assert (found <= scores.high + slip).all(), (found - scores.high).max()


def tensors(*arrays: np.ndarray) -> list:
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_directions(seed, group, length, scale):
    rng = np.random.default_rng(seed)
    keys = scale * rng.standard_normal((length, 8)) + rng.standard_normal(8) * group
    scores = scores_by_direction(keys, SLACK)
    np.testing.assert_allclose(scores.value, distinctness(*tensors(keys[None]))[0].numpy(), atol=1e-12)
    for towards in (None, keys.mean(0)):
        assert_within(scores, distinctness(*tensors(moved(rng, keys, towards)[None]))[0].numpy())


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_expected_queries(seed, group, length, scale):
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
    scores = scores_by_expected_queries(mean, centred.swapaxes(1, 2) @ centred / 30, keys, values, SLACK)
    np.testing.assert_allclose(scores.value, scored(queries, keys, values), rtol=1e-9)
    for towards in (None, queries[0, 0]):
        assert_within(scores, scored(moved(rng, queries, towards), moved(rng, keys, towards), moved(rng, values)))


@settings(max_examples=40, deadline=None)
@given(**CASES, top_r=st.integers(1, 8))
def test_channels(seed, group, length, scale, top_r):
    rng = np.random.default_rng(seed)
    query, keys = scale * rng.standard_normal((group, 8)), rng.standard_normal((length, 8))
    found = row_scores(*tensors(query, keys[None]), top_r=top_r)
    channels = found.channels[0].numpy()
    scores = scores_on_channels(query, keys, channels, SLACK)
    np.testing.assert_allclose(scores.value, found.tokens[0].numpy(), atol=1e-12)
    for towards in (None, query[0]):
        other = tensors(moved(rng, query), moved(rng, keys, towards)[None])
        again = row_scores(*other, top_r=top_r, channels=found.channels).tokens[0].numpy()
        assert_within(scores, again)


@settings(max_examples=40, deadline=None)
@given(**CASES, page_size=st.integers(1, 5))
def test_pages(seed, group, length, scale, page_size):
    rng = np.random.default_rng(seed)
    query, keys = scale * rng.standard_normal(8), rng.standard_normal((length, 8)) * group

    def scored(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
        query, keys = tensors(query[None], keys[None, None])
        bounds = reference.page_bounds(keys, torch.tensor([length]), page_size)
        return page_scores(query, length, *(table[0] for table in bounds), page_size=page_size)[0].numpy()

    scores = scores_of_pages(query, keys, page_size, SLACK)
    np.testing.assert_allclose(scores.value, scored(query, keys), atol=1e-12)
    for towards in (None, query):
        assert_within(scores, scored(moved(rng, query), moved(rng, keys, towards)))


def test_what_could_be_the_best_is_explained_and_nothing_else():
    scores = BoundedScores.within(np.array([5.0, 3.0, 2.9, 1.0]), np.array([0.1, 0.1, 0.1, 0.1]))
    assert scores.unexplained(np.array([0, 1])) is None
    assert scores.unexplained(np.array([0, 2])) is None
    assert scores.unexplained(np.array([1, 2])) == "float64 scores differ by 2.1e+00, a near-tie allows 2.0e-01"
    assert scores.unexplained(np.arange(4)) is None
    assert scores.without_last().unexplained(np.arange(3)) is None


def test_a_token_that_is_certain_must_be_there_whatever_else_is_uncertain():
    """2 may be anything, so it may be taken; but not together with 1 in place of 0."""
    scores = BoundedScores.within(np.array([5.0, 4.0, 1.0]), np.array([0.0, 0.0, 9.0]))
    assert scores.unexplained(np.array([0, 2])) is None
    assert scores.unexplained(np.array([1, 2])) is not None
