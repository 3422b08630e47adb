"""Candidates by their bytes, narrowing down, and the choice, on recorded qualities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.accuracy.grid import Variant
from kvc_trt.errors import InputError
from kvc_trt.tuning.candidates import SPARED, STEP, Candidate, candidates, method_names, methods
from kvc_trt.tuning.differences import FEWEST, Qualities
from kvc_trt.tuning.halving import narrowed, rounds
from kvc_trt.tuning.recommendation import front, on_halves, recommend


def one(name: str, size: int) -> Candidate:
    return Candidate(Variant(name, 64), size)


def noisy(mean: float, prompts: int = 40, noise: float = 0.1, seed: int = 0) -> list[float]:
    return list(mean + noise * np.random.default_rng(seed).standard_normal(prompts))


def test_methods_are_policies_in_formats_with_their_settings():
    named = ["tova", "snapkv-gqa", "h2o:kv_cache=k8v4"]
    found = list(methods(named, ["auto", "int8"], {"snapkv-gqa": ("", "pool_kernel=7")}))
    assert found == [
        "tova", "tova:kv_cache=int8", "snapkv-gqa", "snapkv-gqa:pool_kernel=7", "snapkv-gqa:kv_cache=int8",
        "snapkv-gqa:pool_kernel=7:kv_cache=int8", "h2o:kv_cache=k8v4",
    ]  # fmt: skip


def test_default_methods_have_wider_pools_and_budgets_by_layer_where_they_can():
    found = method_names(None, ["auto"], measures_layers=True)
    assert {"snapkv-gqa", "snapkv-gqa:pool_kernel=17", "streaming-llm:layer_budget=squeeze", "full"} <= set(found)
    assert "hybrid:layer_budget=squeeze" not in found
    assert {one.partition(":")[0] for one in found} == {
        "full", "rocketkv", "snapkv++", "snapkv-gqa", "pyramidkv", "expected-attention", "keydiff", "tova",
        "streaming-llm", "hybrid",
    }  # fmt: skip
    without = method_names(None, ["auto"], measures_layers=False)
    assert [one for one in found if "squeeze" not in one] == without
    assert method_names(["tova:window=8"], None, measures_layers=True) == [
        "tova:window=8", "tova:window=8:kv_cache=int8", "tova:window=8:kv_cache=int4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("policies", "formats", "message"),
    [
        (["tovaa"], None, "did you mean 'tova'"),
        (["exact-topk"], None, "has no engine"),
        (None, ["int5"], "unknown cache format 'int5'"),
    ],
)
def test_unknown_methods_are_refused(policies, formats, message):
    with pytest.raises(InputError, match=message):
        method_names(policies, formats, measures_layers=False)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 64), st.integers(0, 300))
def test_the_largest_budget_that_fits_is_tried(limit, per_token, smallest):
    def row_bytes(variant):
        if variant.name == "full":
            return per_token * 2100
        if variant.token_budget < smallest:
            raise InputError("too small")
        return per_token * variant.token_budget

    found = candidates(["tova"], row_bytes, limit, 2048)
    most = min(limit, SPARED * per_token * 2100)
    sizes = {budget: per_token * budget for budget in range(STEP, 2049, STEP) if budget >= smallest}
    fitting = [budget for budget, size in sizes.items() if size <= most]
    if fitting:
        assert max(item.variant.token_budget for item in found.fitting) == max(fitting)
        assert not found.refused
    else:
        assert not found.fitting
        assert list(found.refused) == ["tova"]
    assert all(item.row_bytes <= limit for item in found.fitting)


def test_the_whole_cache_has_no_budget_and_is_refused_where_it_does_not_fit():
    found = candidates(["full", "full:kv_cache=int8"], lambda one: 100 if one.settings else 400, 100, 512)
    assert [str(item) for item in found.fitting] == ["full:kv_cache=int8"]
    assert found.refused == {"full": "a row takes 400 B, and 100 B are given"}


def test_policies_that_read_a_part_may_store_more_than_the_whole_cache():
    found = candidates(["hybrid", "tova"], lambda one: 2 * (one.token_budget or 500), 10_000, 512)
    assert {str(item): item.row_bytes for item in found.fitting} == {
        "tova 160": 320, "tova 352": 704, "hybrid 256": 512, "hybrid 512": 1024,
    }  # fmt: skip


def test_rounds_grow_to_all_prompts():
    assert list(rounds(48)) == [6, 12, 24, 48]
    assert list(rounds(7)) == [6, 7]
    assert list(rounds(3)) == [3]


def test_halving_keeps_the_best_and_what_is_smaller_and_not_worse():
    good, same, small, bad = one("good", 10), one("same", 20), one("small", 5), one("bad", 30)
    base = noisy(0.8)
    qualities = Qualities({
        bad: [value - 0.3 for value in base], same: base, small: noisy(0.79, seed=1), good: [v + 0.001 for v in base],
    })  # fmt: skip
    found = narrowed(qualities)
    assert found.stayed == (good, small)
    assert found.dropped == {same: good, bad: good}


def test_too_few_prompts_distinguish_no_candidates():
    qualities = Qualities({one("a", 1): [1.0] * (FEWEST - 1), one("b", 2): [0.0] * (FEWEST - 1)})
    assert not qualities.worse(one("b", 2), one("a", 1))
    with pytest.raises(ValueError, match="the same prompts"):
        Qualities({"a": [1.0], "b": []})


def test_the_smallest_candidate_as_good_as_the_best_is_recommended():
    large, small, tiny = one("large", 30), one("small", 10), one("tiny", 2)
    base = noisy(0.8)
    qualities = Qualities({large: base, small: [v - 0.01 * (-1) ** i for i, v in enumerate(base)], tiny: noisy(0.4)})
    found = recommend(qualities, whole=base)
    assert found.chosen == small
    assert found.alike == (small, large)
    assert found.behind[1] <= 0 <= found.behind[2]
    assert found.confidence == 1.0
    assert found.good_enough
    assert front(qualities) in ([tiny, small], [tiny, small, large])


def test_a_recommendation_says_if_no_candidate_is_good_enough():
    qualities = Qualities({one("tiny", 2): noisy(0.4)})
    assert not recommend(qualities, whole=noisy(0.8)).good_enough
    assert recommend(qualities, whole=noisy(0.8), allowed_loss=0.5).good_enough
    assert recommend(qualities).good_enough


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=8, max_size=8)),
                min_size=1, max_size=6))  # fmt: skip
def test_a_choice_is_never_dominated(rows):
    qualities = Qualities({one(f"c{place}", size): values for place, (size, values) in enumerate(rows)})
    found, ordered = recommend(qualities), front(qualities)
    assert found.chosen in ordered
    assert found.chosen.row_bytes <= found.best.row_bytes
    for other in qualities.by_name:
        if other.row_bytes < found.chosen.row_bytes:
            told = qualities.worse(other, found.best) or not qualities.within_one_error(other, found.best)
            assert told or other not in ordered
        if other.row_bytes <= found.chosen.row_bytes:
            assert qualities.mean(other) <= qualities.mean(found.chosen)
    means = [qualities.mean(item) for item in ordered]
    assert means == sorted(means)
    assert means[-1] == qualities.mean(found.best)
    assert ordered[0] in narrowed(qualities).stayed or qualities.worse(ordered[0], found.best)


def test_a_choice_on_one_half_is_checked_on_the_other():
    base, luck = noisy(0.8), [0.5 * (place % 2) for place in range(40)]
    good, lucky = one("good", 10), one("lucky", 9)
    qualities = Qualities({good: base, lucky: [value - 0.25 + part for value, part in zip(base, luck, strict=True)]})
    first, second = on_halves(qualities)
    assert (first.chosen, first.best_of_other, first.holds) == (good, lucky, False)
    assert (second.chosen, second.best_of_other, second.holds) == (lucky, good, False)
    assert first.behind[0] == pytest.approx(0.25)
    assert on_halves(Qualities({good: base[: 2 * FEWEST - 1]})) is None
