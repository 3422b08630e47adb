"""Engines that drop one token for each that they append: against the reference, alone, within the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt.engine.program import build_twin_decode, build_twin_prefill
from kvc_trt.graph.state import cache_sites
from tests.graph.rolling import reference_roll, roll
from tests.graph.small_models import FAMILIES, prompts_of, resolve
from tests.rounding import assert_close

STEPS = 90
ENGINES = {
    "streaming-llm": ("streaming-llm", {}),
    "streaming-llm ranked": ("streaming-llm", {"positions": "cache"}),
    "streaming-llm, few recent": ("streaming-llm", {"sinks": 4, "recent": 13}),
    "sliding-window": ("sliding-window", {}),
    "sliding-window ranked": ("sliding-window", {"positions": "cache"}),
    "h2o": ("h2o", {}),
    "h2o, few recent": ("h2o", {"recent": 3}),
    "tova": ("tova", {}),
    "tova, some recent": ("tova", {"recent": 9}),
}


def positions_in_ring(capacity, sinks, length):
    """Position of the token in each slot of a row that held `length` tokens: every token replayed, -1 where none."""
    slots = np.full(capacity, -1)
    for token in range(length):
        slots[token if token < capacity else sinks + (token - sinks) % (capacity - sinks)] = token
    return slots


def by_position(result, site, row, prompt, steps):
    """Positions [G,m] ascending, and their keys and values."""
    rule, tables = site.parameters, [result[f"{kind}.{site.name}"][row] for kind in ("k_cache", "v_cache")]
    if f"slot_positions.{site.name}" in result:
        positions = result[f"slot_positions.{site.name}"][row]
    else:
        # A prompt that was cut is laid out as if the ring had started with it.
        cut = max(0, prompt - rule.capacity)
        ring = positions_in_ring(rule.capacity, rule.sinks, prompt - cut + steps)
        ring = np.where(ring >= rule.sinks, ring + cut, ring)
        positions = np.broadcast_to(ring, tables[0].shape[:2])
    order = np.argsort(np.where(positions < 0, 1 << 30, positions), axis=1)
    order = order[:, : (positions[0] >= 0).sum()]
    return np.take_along_axis(positions, order, 1), *(np.take_along_axis(t, order[..., None], 1) for t in tables)


def check_caches(engine, result, cache, prompts, step):
    for index, (site, layer) in enumerate(zip(cache_sites(engine.model, engine.parameters), cache.caches, strict=True)):
        if not site.parameters.evicts_while_decoding:
            continue
        if step == 0:
            np.testing.assert_array_equal(result["cache_lengths"][index], layer.lengths.numpy())
            width = layer.indices.shape[2]
            np.testing.assert_array_equal(result[f"indices.{site.name}"][:, :, :width], layer.indices.numpy())
        for row, prompt in enumerate(prompts):
            m = int(layer.lengths[row])
            positions, keys, values = by_position(result, site, row, len(prompt), step)
            np.testing.assert_array_equal(positions, layer.positions[row, :, :m].numpy())
            assert_close(keys, layer.keys[row, :, :m])
            assert_close(values, layer.values[row, :, :m])


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_logits_and_what_stays_equal_the_reference(make_engine, name):
    """Prompts above, at and below the budget; every row loses tokens in the end."""
    policy, changes = ENGINES[name]
    engine = make_engine(policy, max_output_len=STEPS, skip_layers=1, **changes)
    prompts = prompts_of(250, 7, 32, 33, 100)
    runs = zip(roll(engine, prompts, STEPS), reference_roll(engine, prompts, STEPS), strict=True)
    for step, (result, (logits, cache)) in enumerate(runs):
        assert_close(result["logits"], logits)
        if step % 10 == 0 or step < 3:
            check_caches(engine, result, cache, prompts, step)
    assert all(layer.lengths.max() <= engine.parameters.capacity for layer in cache.caches[1:])
    assert all(len(prompt) + STEPS > 2 * 32 for prompt in prompts)


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("qwen3", "streaming-llm"), ("yarn", "streaming-llm"), ("qwen2", "h2o"), ("longchat", "h2o"), ("qwen3", "tova"),
    ],
)  # fmt: skip
def test_other_model_families_equal_the_reference(make_engine, family, policy):
    changes = {"positions": "cache"} if policy == "streaming-llm" else {}
    engine = make_engine(policy, model=FAMILIES[family], max_output_len=40, **changes)
    prompts = prompts_of(60, 33)
    for result, (logits, _) in zip(roll(engine, prompts, 40), reference_roll(engine, prompts, 40), strict=True):
        assert_close(result["logits"], logits)


def test_a_sliding_window_is_streaming_without_sinks(make_engine):
    prompts = prompts_of(70, 20)
    engines = [make_engine(policy, max_output_len=40, **more) for policy, more in (
        ("sliding-window", {}), ("streaming-llm", {"sinks": 0}),
    )]  # fmt: skip
    for ours, theirs in zip(*(roll(engine, prompts, 40) for engine in engines), strict=True):
        np.testing.assert_array_equal(ours["logits"], theirs["logits"])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("name", ["streaming-llm", "streaming-llm ranked", "h2o", "tova"])
def test_a_batch_within_the_budget_is_bit_identical_to_the_dense_twin(make_engine, name, precision):
    """Holds up to the last step that fits: for H2O and TOVA the step that attends to one token more than the budget."""
    policy, changes = ENGINES[name]
    engine = make_engine(policy, precision, skip_layers=1, max_output_len=20, **changes)
    twin = make_engine(
        engine.parameters.keeping_everything(), precision,
        prefill=lambda *arguments, **keywords: build_twin_prefill(engine.model, engine.parameters, **keywords),
        decode=lambda *arguments, **keywords: build_twin_decode(engine.model, engine.parameters, **keywords),
    )  # fmt: skip
    prompts, fitting = prompts_of(20, 1, 12), engine.parameters.capacity - 20
    runs = list(zip(roll(engine, prompts, fitting + 1), roll(twin, prompts, fitting + 1), strict=True))
    for ours, dense in runs[:-1]:
        np.testing.assert_array_equal(ours["logits"], dense["logits"])
    assert (runs[-1][0]["logits"][0] != runs[-1][1]["logits"][0]).any()


@pytest.mark.parametrize("name", ["streaming-llm", "streaming-llm ranked", "h2o", "tova"])
def test_a_row_does_not_depend_on_its_neighbours(make_engine, name):
    policy, changes = ENGINES[name]
    engine = make_engine(policy, max_output_len=40, **changes)
    prompts = prompts_of(200, 40, 5)
    together = [result["logits"] for result in roll(engine, prompts, 40)]
    tokens = np.random.default_rng(1).integers(2, 97, (40, 3))
    for row in range(3):
        result = engine.prefill(prompts[row : row + 1])
        lengths, position = result["cache_lengths"], np.array([len(prompts[row])])
        for step in range(40):
            result = engine.decode(tokens[step, row : row + 1], position + step, lengths + step, result)
            assert_close(result["logits"][0], together[step + 1][row])


@pytest.mark.parametrize("policy", ["streaming-llm", "h2o", "tova"])
def test_a_sequence_that_always_fits_needs_no_more_than_its_own_slots(make_engine, policy):
    """A budget beyond the longest sequence: no slot is ever overwritten, whatever the sinks."""
    more = {"sinks": 40} if policy == "streaming-llm" else {}
    engine = make_engine(policy, token_budget=100, max_input_len=20, max_output_len=6, **more)
    assert engine.parameters.capacity == 26 + (policy != "streaming-llm")
    prompts = prompts_of(20, 3)
    for result, (logits, _) in zip(roll(engine, prompts, 6), reference_roll(engine, prompts, 6), strict=True):
        assert_close(result["logits"], logits)


@pytest.mark.parametrize("policy", ["streaming-llm", "h2o", "tova"])
def test_layers_may_have_budgets_of_their_own(make_engine, policy):
    parameters = replace(resolve(policy, max_output_len=60), layer_budgets=(40, 17, 32))
    for layer, budget in enumerate(parameters.layer_budgets):
        found, expected = parameters.groups(layer)[0].parameters, resolve(policy, token_budget=budget)
        assert (found.capacity, found.recent, found.sinks) == (expected.capacity, expected.recent, expected.sinks)
    engine = make_engine(parameters)
    slots = [tensor.shape[1] for tensor in engine.state if tensor.name.startswith("k_cache")]
    assert slots == [budget + parameters.spare_slots for budget in parameters.layer_budgets]
    prompts = prompts_of(90, 20)
    runs = zip(roll(engine, prompts, 60), reference_roll(engine, prompts, 60), strict=True)
    for step, (result, (logits, cache)) in enumerate(runs):
        assert_close(result["logits"], logits)
        if step % 30 == 0:
            check_caches(engine, result, cache, prompts, step)
