"""Pooling: what each setting keeps is what the policy keeps, and the page of a tiny measurement."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.studies.pooling.measure import (
    CAPACITIES,
    CONFIGURATIONS,
    BesideTheWhole,
    Observed,
    Variant,
    found,
    pooled,
)
from benchmarks.studies.pooling.page import page, smallest
from benchmarks.studies.watched import WatchedDecoder
from kvc_trt import policies
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.small_model import SMALL

LONGEST = 64
TEXT = torch.randint(2, SMALL.vocab_size, (40,), generator=torch.Generator().manual_seed(3)).tolist()
FOLLOWING = TEXT[:6]


def test_pooled_votes_match_hand_computed_values():
    votes = torch.tensor([[1.0, 0.0, 0.0, 6.0, 2.0]])
    assert pooled(votes, "none", 1).tolist() == [[1, 0, 0, 6, 2]]
    assert pooled(votes, "max", 3).tolist() == [[1, 1, 6, 6, 6]]
    # Zeros lie around the prefix, and they count.
    assert pooled(votes, "avg", 3)[0].tolist() == pytest.approx([1 / 3, 1 / 3, 2, 8 / 3, 8 / 3])


def test_text_behind_what_is_kept_has_the_logits_of_the_policy():
    weights = RandomWeights(SMALL, 0)
    watched = WatchedDecoder.of(SMALL, weights, LONGEST)
    variants = [Variant(4, "max", 3, 12), Variant(4, "avg", 3, 12), Variant(8, "max", 1, 20), Variant(4, "avg", 5, 10)]
    for one, logits in zip(variants, watched.along(TEXT, FOLLOWING, Observed(variants)), strict=True):
        rule = policies.resolve(
            "snapkv", model=SMALL, token_budget=32, max_input_len=LONGEST - 16, max_output_len=16,
            prompt_budget=one.capacity, window=one.window, pool_kernel=one.kernel,
            pool_kind=one.pool,
        )  # fmt: skip
        decoder = ReferenceDecoder(SMALL, weights, method=policies.method(rule), parameters=rule)
        first, cache = decoder.prefill(torch.tensor([TEXT]), torch.tensor([len(TEXT)]))
        steps = [decoder.decode(torch.tensor([token]), cache) for token in FOLLOWING[:-1]]
        torch.testing.assert_close(logits, torch.cat([first, *steps]), atol=1e-5, rtol=1e-5)


def test_a_budget_of_everything_equals_the_whole_cache():
    watched = WatchedDecoder.of(SMALL, RandomWeights(SMALL, 0), LONGEST)
    logits, _ = watched.along(TEXT, FOLLOWING, BesideTheWhole(Observed([Variant(4, "max", 3, 12)])))
    whole, _ = watched.prefill(torch.tensor([TEXT + FOLLOWING[:-1]]), torch.tensor([len(TEXT) + len(FOLLOWING) - 1]))
    torch.testing.assert_close(logits[-1:], whole, atol=1e-5, rtol=1e-5)
    said = logits.argmax(dim=-1).tolist()
    assert found(logits, said)
    assert not found(logits, [*said[:-1], said[-1] + 1])


def record(length, depth, scores):
    """Return a needle that is found by each configuration from a capacity on."""
    key = {"model": "m", "length": length, "lengths": [512], "depth": depth}
    found = [int(scores(one) <= capacity) for one in CONFIGURATIONS for capacity in CAPACITIES]
    versions = {"kvc_trt": "0", "onnxruntime": "0", "torch": "0"}
    measured = {"whole": 1, "found": found}
    return {"key": key, "measured": measured, "machine": {"commit": "a", "device": "d", "versions": versions}}


def test_the_page_says_what_pooling_is_worth_and_where_needles_are_found():
    by_kernel = {1: 1000, 5: 192, 7: 192, 9: 192, 17: 96}
    known = [record(512, depth, lambda one: by_kernel[one[2]]) for depth in (0.0, 0.5, 1.0)]
    assert smallest(known, (16, "max", 5)) == 192
    assert math.isnan(smallest(known, (16, "none", 1)))
    written = page(known)
    rows = [line for line in written.text.splitlines() if line.startswith("| ") and "| **" in line]
    assert [row.split("**")[1] for row in rows] == ["holds"] * 4
    assert "max 5 +60 points" in rows[0]
    assert all(content.startswith(b"\x89PNG") for content in written.images.values())


def test_a_capacity_below_a_failing_larger_one_does_not_hold():
    one = record(512, 0.0, lambda _: 96)
    first = CONFIGURATIONS.index((16, "max", 5)) * len(CAPACITIES)
    one["measured"]["found"][first + 1] = 0
    assert smallest([one], (16, "max", 5)) == CAPACITIES[2]
