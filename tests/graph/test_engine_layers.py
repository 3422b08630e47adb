"""Engines whose caches are not all alike: per query head, per layer."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.graph.state import cache_sites
from tests.graph.rolling import check_layers, reference_roll, roll
from tests.graph.small_models import LLAMA, prompts_of

SHAPES = {
    "snapkv": {"token_budget": 72, "window": 8, "pool_kernel": 7},
    "pyramidkv": {"token_budget": 72, "window": 8, "pool_kernel": 7},
}
EVICTION = {"token_budget": 40, "window": 8, "pool_kernel": 7}
SQUEEZED = {"layer_budget": "squeeze", "layer_budgets": (50, 20, 32)}
ONLINE = {"layer_budget": "squeeze-online", "squeeze_share": 0.5}


@pytest.mark.parametrize("skip_layers", [0, 1])
@pytest.mark.parametrize("policy", SHAPES)
def test_logits_and_every_index_equal_the_reference(make_engine, policy, skip_layers):
    engine = make_engine(policy, skip_layers=skip_layers, **SHAPES[policy])
    prompts = prompts_of(250, 7, 130, 33)
    runs = zip(roll(engine, prompts), reference_roll(engine, prompts), strict=True)
    for step, (result, (logits, cache)) in enumerate(runs):
        np.testing.assert_allclose(result["logits"], logits.numpy(), atol=1e-4)
        check_layers(engine, result, cache, step)


@pytest.mark.slow
@pytest.mark.parametrize("skip_layers", [0, 1])
@pytest.mark.parametrize(
    "division", [SQUEEZED, ONLINE, {**ONLINE, "squeeze_cap": 1.3}], ids=["squeeze", "squeeze-online", "less room"]
)
@pytest.mark.parametrize("policy", ["rocketkv", "snapkv-gqa"])
def test_layer_budgets_are_those_of_the_reference(make_engine, policy, division, skip_layers):
    engine = make_engine(policy, skip_layers=skip_layers, **EVICTION, **division)
    prompts = prompts_of(250, 7, 130, 33)
    runs = zip(roll(engine, prompts), reference_roll(engine, prompts), strict=True)
    for step, (result, (logits, cache)) in enumerate(runs):
        np.testing.assert_allclose(result["logits"], logits.numpy(), atol=1e-4)
        check_layers(engine, result, cache, step)


def test_rocketkv_mt_divides_what_it_admits(make_engine):
    """All tokens stay in the cache, so `squeeze` changes the entries that steps may read, and no memory."""
    engine = make_engine("rocketkv-mt", **EVICTION, **SQUEEZED)
    prompts = prompts_of(250, 7, 130, 33)
    runs = zip(roll(engine, prompts), reference_roll(engine, prompts), strict=True)
    for step, (result, (logits, cache)) in enumerate(runs):
        np.testing.assert_allclose(result["logits"], logits.numpy(), atol=1e-4)
        check_layers(engine, result, cache, step)
    whole = [result[f"k_whole.{layer}"].shape[2] for layer in range(3)]
    assert whole == [engine.parameters.max_sequence_len] * 3


@pytest.mark.parametrize("policy", ["h2o", "streaming-llm"])
def test_layer_budgets_of_policies_that_evict_while_decoding(make_engine, policy):
    """Down to the sinks and one recent token."""
    engine = make_engine(policy, token_budget=34, layer_budget="squeeze", layer_budgets=(50, 5, 47), max_output_len=40)
    spare = engine.parameters.spare_slots
    assert [site.parameters.capacity for site in cache_sites(LLAMA, engine.parameters)] == [
        budget + spare for budget in (50, 5, 47)
    ]
    prompts = prompts_of(100, 7, 30)
    runs = zip(roll(engine, prompts, steps=30), reference_roll(engine, prompts, steps=30), strict=True)
    for result, (logits, _) in runs:
        np.testing.assert_allclose(result["logits"], logits.numpy(), atol=1e-4)


def test_online_budgets_differ_between_layers_and_sum_exactly(make_engine):
    engine = make_engine("snapkv-gqa", **EVICTION, **ONLINE)
    lengths = engine.prefill(prompts_of(250, 200, 20))["cache_lengths"]
    budget = engine.parameters.prompt_budget
    for row in (0, 1):
        assert lengths[:, row].sum() == 3 * budget
        assert len(set(lengths[:, row])) > 1
    assert (lengths[:, 2] == 20).all()  # fits everywhere


@pytest.mark.parametrize("skip_layers", [0, 1])
def test_retrieval_and_streaming_heads_are_those_of_the_reference(make_engine, skip_layers):
    scores = ((0.9, 0.1), (0.2, 0.8), (0.3, 0.1))
    engine = make_engine(
        "duo-attention", token_budget=150, sinks=4, recent=20, head_scores=scores, skip_layers=skip_layers
    )
    groups = [len(engine.parameters.groups(layer)) for layer in range(3)]
    assert groups == [1 if skip_layers else 2, 2, 2]
    prompts = prompts_of(250, 7, 130, 33)
    runs = zip(roll(engine, prompts), reference_roll(engine, prompts), strict=True)
    for result, (logits, _) in runs:
        np.testing.assert_allclose(result["logits"], logits.numpy(), atol=1e-4)


def test_snapkv_repeats_the_cache_for_every_query_head(make_engine):
    engine = make_engine("snapkv", **SHAPES["snapkv"])
    assert engine.parameters.prompt_budget == (72 - 8) // 2
    result = engine.prefill(prompts_of(250))
    assert result["k_cache.0"].shape == (1, LLAMA.num_attention_heads, engine.parameters.capacity, 16)
    lists = result["indices.0"][0]
    assert (lists[0] != lists[1]).any()  # two query heads of one KV head choose for themselves


def test_pyramidkv_keeps_less_from_layer_to_layer(make_engine):
    engine = make_engine("pyramidkv", **SHAPES["pyramidkv"])
    slots = [site.parameters.capacity for site in cache_sites(engine.model, engine.parameters)]
    assert slots == [118 + 8, 64 + 8, 10 + 8]  # worked out by hand: 56 free tokens on average, 2 at least
    lengths = engine.prefill(prompts_of(250))["cache_lengths"][:, 0]
    assert lengths.tolist() == list(engine.parameters.layer_budgets)
