"""The extend graph: turns of a conversation, against the reference decoder, decode steps and one-shot prefill."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.graph.build import build_extend
from kvc_trt.graph.state import cache_sites
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.methods.base.registry import method
from kvc_trt.reference.cache import ReferenceCache
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.graph.small_models import FAMILIES, LLAMA, SmallEngine, make_small_engine, open_session, prompts_of, resolve
from tests.rounding import assert_close

KEEPING = ("full", "hybrid", "quest", "quest-matched", "sparq")
COMPACTING = (
    "rocketkv", "snapkv++", "snapkv-gqa", "snapkv", "pyramidkv", "keydiff", "expected-attention",
    "expected-attention-hybrid", "rocketkv-mt",
)  # fmt: skip
ONE_AT_A_TIME = ("streaming-llm", "sliding-window", "h2o", "tova")
"""Policies whose steps evict."""
TURNS = ((1, 40, 9), (33, 1, 140))
"""New tokens of each row in two turns."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """engine(policy) with an extend graph, one per policy and settings."""
    made: dict[tuple, SmallEngine] = {}

    def engine(policy: str, **changes) -> SmallEngine:
        key = (policy, *sorted(changes.items(), key=lambda item: item[0]))
        if key not in made:
            settings_of = {**room_of(policy), **changes}
            made[key] = make_small_engine(tmp_path_factory.mktemp("turns"), policy, turns=True, **settings_of)
        return made[key]

    return engine


def room_of(policy: str) -> dict[str, int]:
    """Lengths and budgets so that policies which keep everything have room for the turns, and all others evict."""
    if policy in KEEPING:
        return {"max_input_len": 250, "max_output_len": 200}
    budget = {"snapkv": 96, "pyramidkv": 64, "streaming-llm": 32, "sliding-window": 32, "h2o": 32, "tova": 32}
    more = {"window": 8, "pool_kernel": 7} if policy == "rocketkv-mt" else {}
    return {"max_input_len": 450, "max_output_len": 8, "token_budget": budget.get(policy, 48), **more}


def decoder_of(engine: SmallEngine) -> ReferenceDecoder:
    return ReferenceDecoder(
        engine.model, EngineWeights(engine.directory / "weights.safetensors"),
        method=method(engine.parameters), parameters=engine.parameters,
    )  # fmt: skip


def blocks_of(lengths: tuple[int, ...], seed: int) -> list[np.ndarray]:
    return prompts_of(*lengths, seed=seed)


def padded(blocks: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(block) for block in blocks])
    table = torch.zeros(len(blocks), int(lengths.max()), dtype=torch.int64)
    for row, block in zip(table, blocks, strict=True):
        row[: len(block)] = torch.from_numpy(block)
    return table, lengths


def conversation(engine: SmallEngine, prompts, turns=TURNS, steps=2) -> Iterator[tuple[dict, torch.Tensor, object]]:
    """Prompt, steps, turn, steps, turn: (the engine's result, the reference's logits, its cache) after each."""
    decoder = decoder_of(engine)
    result = engine.prefill(prompts)
    logits, cache = decoder.prefill(*padded(prompts))
    yield result, logits, cache
    positions, lengths = np.array([len(prompt) for prompt in prompts]), result["cache_lengths"]
    for number, turn in enumerate(turns):
        for tokens in np.random.default_rng(number).integers(2, 97, (steps, len(prompts))):
            result = engine.decode(tokens, positions, lengths, result)
            positions, lengths = positions + 1, lengths + 1
            yield result, decoder.decode(torch.from_numpy(tokens), cache), cache
        blocks = blocks_of(turn, seed=10 + number)
        result = engine.extend(blocks, positions, lengths, result)
        positions, lengths = positions + np.array(turn), result["cache_lengths"]
        yield result, decoder.extend(*padded(blocks), cache), cache


def check(engine: SmallEngine, result: dict, logits: torch.Tensor, cache: ReferenceCache) -> None:
    np.testing.assert_allclose(result["logits"], logits.numpy(), atol=2e-4)
    if "cache_lengths" not in result:
        return  # a step
    for index, (site, layer) in enumerate(zip(cache_sites(engine.model, engine.parameters), cache.caches, strict=True)):
        stored = np.minimum(result["cache_lengths"][index], site.parameters.capacity)
        np.testing.assert_array_equal(stored, layer.lengths.numpy())
        if f"indices.{site.name}" in result:
            kept = layer.indices.numpy()
            found = result[f"indices.{site.name}"]
            np.testing.assert_array_equal(found[:, :, : kept.shape[2]], kept)
            assert (found[:, :, kept.shape[2] :] == -1).all()
        if not site.parameters.drops_before_append:  # a ring's slots are not in text order
            np.testing.assert_allclose(result[f"k_cache.{site.name}"], layer.keys.numpy(), atol=2e-4)
            np.testing.assert_allclose(result[f"v_cache.{site.name}"], layer.values.numpy(), atol=2e-4)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("policy", [*KEEPING, *COMPACTING, *ONE_AT_A_TIME])
def test_turns_equal_the_reference(engines, policy):
    engine = engines(policy)
    for result, logits, cache in conversation(engine, prompts_of(100, 7, 33)):
        check(engine, result, logits, cache)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_the_reference(tmp_path, family):
    lengths = {"max_input_len": 450, "max_output_len": 8}
    engine = make_small_engine(tmp_path, "rocketkv", model=FAMILIES[family], turns=True, skip_layers=1, **lengths)
    for result, logits, cache in conversation(engine, prompts_of(100, 7, 33)):
        check(engine, result, logits, cache)


def roll_to(engine: SmallEngine, prompts) -> tuple[np.ndarray, np.ndarray, dict]:
    """Prefill: positions, cache lengths, state."""
    result = engine.prefill(prompts)
    return np.array([len(prompt) for prompt in prompts]), result["cache_lengths"], result


@pytest.mark.parametrize("policy", ["full", "snapkv++", "keydiff"])
def test_many_tokens_at_once_are_as_many_steps(engines, policy):
    """Holds where a step reads everything and nothing is evicted between steps."""
    engine = engines(policy, token_budget=200, max_input_len=450, max_output_len=60)
    prompts, turn = prompts_of(60, 7, 33), (40, 12, 1)
    positions, lengths, state = roll_to(engine, prompts)
    blocks = blocks_of(turn, seed=4)
    at_once = engine.extend(blocks, positions, lengths, state)
    for row, (block, prompt) in enumerate(zip(blocks, prompts, strict=True)):
        alone = engine.prefill([prompt])
        for i, token in enumerate(block):
            place = np.array([len(prompt) + i])
            alone = engine.decode(np.array([token]), place, np.full_like(lengths[:, :1], len(prompt) + i), alone)
        np.testing.assert_allclose(at_once["logits"][row], alone["logits"][0], atol=1e-5)
        count = len(prompt) + len(block)
        for tensor in engine.state:
            if tensor.name.startswith(("k_cache", "v_cache")):
                found, expected = at_once[tensor.name][row, :, :count], alone[tensor.name][0, :, :count]
                np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("policy", [*KEEPING, *COMPACTING, *ONE_AT_A_TIME])
def test_prompt_and_turn_are_one_prompt_where_nothing_was_evicted(engines, policy):
    engine = engines(policy, **({"token_budget": 450} if policy != "snapkv" else {"token_budget": 900}))
    prompts, turn = prompts_of(60, 7, 33), (40, 12, 1)
    blocks = blocks_of(turn, seed=4)
    positions, lengths, state = roll_to(engine, prompts)
    found = engine.extend(blocks, positions, lengths, state)
    whole = engine.prefill([np.concatenate(both) for both in zip(prompts, blocks, strict=True)])
    np.testing.assert_array_equal(found["cache_lengths"], whole["cache_lengths"])
    assert_close(found["logits"], whole["logits"])
    for tensor in engine.state:
        assert_close(found[tensor.name], whole[tensor.name], name=tensor.name)


def test_all_logits_are_those_of_every_token(engines, tmp_path):
    last = engines("rocketkv")
    every = make_small_engine(tmp_path, "rocketkv", turns=True, all_logits=True, **room_of("rocketkv"))
    prompts, block = prompts_of(60), blocks_of((20,), seed=4)[0]
    found = every.extend([block], *roll_to(every, prompts))["logits"]
    assert found.shape == (1, 20, LLAMA.vocab_size)
    for count in (1, 7, 20):
        single = last.extend([block[:count]], *roll_to(last, prompts))["logits"]
        np.testing.assert_allclose(found[:, count - 1], single, atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(engines):
    engine = engines("rocketkv")
    prompts, blocks = prompts_of(100, 7, 33), blocks_of((1, 40, 130), seed=5)
    together = engine.extend(blocks, *roll_to(engine, prompts))
    for row in range(3):
        alone = engine.extend(blocks[row : row + 1], *roll_to(engine, prompts[row : row + 1]))
        np.testing.assert_allclose(alone["logits"][0], together["logits"][row], atol=1e-5)
        for name in ("indices.0", "slot_positions.0", "cache_lengths"):
            axis = 1 if name == "cache_lengths" else 0
            np.testing.assert_array_equal(alone[name].take(0, axis), together[name].take(row, axis))


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_reduced_precision_is_near_the_reference(tmp_path, precision):
    lengths = {"max_input_len": 450, "max_output_len": 8}
    engine = make_small_engine(tmp_path, "full", precision, FAMILIES["qwen2"], turns=True, **lengths)
    for result, logits, _ in conversation(engine, prompts_of(60, 130), turns=((20, 40),), steps=1):
        error = np.abs(result["logits"] - logits.numpy()).max() / np.abs(logits.numpy()).max()
        assert error < (0.02 if precision == "fp16" else 0.1)


@settings(max_examples=12, deadline=None)
@given(
    policy=st.sampled_from(["rocketkv", "hybrid", "expected-attention", "h2o", "streaming-llm", "tova"]),
    prompts=st.lists(st.integers(1, 140), min_size=2, max_size=2),
    turns=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    steps=st.integers(0, 2),
)
def test_random_conversations_equal_the_reference(engines, policy, prompts, turns, steps):
    engine = engines(policy)
    for result, logits, cache in conversation(engine, prompts_of(*prompts), tuple(turns), steps):
        check(engine, result, logits, cache)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rocketkv", "snapkv", "keydiff", "h2o", "tova", "streaming-llm"])
def test_two_hundred_turns_stay_within_the_budget(engines, policy):
    engine = engines(policy, max_input_len=8000, max_output_len=8, token_budget=64 if policy != "snapkv" else 96)
    positions, lengths, state = roll_to(engine, prompts_of(100))
    sizes = {tensor.name: state[tensor.name].nbytes for tensor in engine.state}
    for number in range(200):
        block = blocks_of((1 + number % 37,), seed=number)
        state = engine.extend(block, positions, lengths, state)
        positions, lengths = positions + len(block[0]), state["cache_lengths"]
        assert {name: state[name].nbytes for name in sizes} == sizes
        for site, stored in zip(cache_sites(engine.model, engine.parameters), lengths[:, 0], strict=True):
            assert min(stored, site.parameters.capacity) <= site.parameters.capacity - site.parameters.spare_slots
            if not site.parameters.evicts_while_decoding:
                assert stored <= site.parameters.prompt_budget
    assert np.isfinite(state["logits"]).all()


@pytest.mark.parametrize(
    ("policy", "changes", "reason"),
    [
        ("streaming-llm", {"positions": "cache"}, "which a block of new tokens renumbers"),
        ("rocketkv", {"layer_budget": "squeeze-online"}, "layer budgets are measured on a prompt"),
    ],
)
def test_a_policy_that_cannot_say_a_turn_is_refused(engines, policy, changes, reason):
    parameters = resolve(policy, **changes)
    assert reason in parameters.no_turn
    with pytest.raises(InputError, match=f"policy {policy} takes no turns: .*{reason}"):
        build_extend(LLAMA, parameters, weights=_weights_of(engines("full")))


def _weights_of(engine: SmallEngine):
    from kvc_trt.graph.weights import GraphWeights

    return GraphWeights(engine.directory / "weights.safetensors")


def test_graphs_without_turns_carry_nothing_for_them(engines, tmp_path):
    without = make_small_engine(tmp_path, "rocketkv", max_input_len=450, max_output_len=8)
    names = {tensor.name for tensor in engines("rocketkv").state} - {tensor.name for tensor in without.state}
    assert names == {"slot_positions.0", "slot_positions.1", "slot_positions.2"}
    assert open_session(without.decode_model, without.directory) is not None


def test_heads_that_keep_everything_beside_heads_that_do_not(tmp_path):
    """DuoAttention: two caches of one layer, each with its own rule."""
    lengths = {"token_budget": 650, "max_input_len": 900, "max_output_len": 100, "sinks": 4, "recent": 28}
    scores = [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]
    engine = make_small_engine(tmp_path, "duo-attention", turns=True, head_scores=scores, **lengths)
    assert len(cache_sites(engine.model, engine.parameters)) > engine.model.num_hidden_layers
    for result, logits, cache in conversation(engine, prompts_of(100, 7, 33)):
        check(engine, result, logits, cache)


def test_a_turn_of_the_whole_cache_sees_what_the_first_question_did_not(engines):
    """However little steps read, a turn of rocketkv-mt attends to every token, and admits from all of them."""
    engine, dense = engines("rocketkv-mt"), engines("full", max_input_len=450, max_output_len=8)
    prompts = prompts_of(300, 40)
    ours, theirs = roll_to(engine, prompts), roll_to(dense, prompts)
    assert ours[1].tolist() == [[engine.parameters.kept_of(n) for n in (300, 40)]] * LLAMA.num_hidden_layers
    for number, turn in enumerate(((30, 9), (1, 60))):
        blocks = blocks_of(turn, seed=20 + number)
        found, whole = engine.extend(blocks, *ours), dense.extend(blocks, *theirs)
        np.testing.assert_allclose(found["logits"], whole["logits"], atol=1e-5)
        positions = ours[0] + np.array(turn)
        for row, stored in enumerate(positions):
            for kind in "kv":
                ours_whole, full = found[f"{kind}_whole.0"][row, :, :stored], whole[f"{kind}_cache.0"][row, :, :stored]
                np.testing.assert_allclose(ours_whole, full, atol=1e-5)
        admitted = found["indices.0"][0]
        assert (admitted.max(axis=-1) == positions[0] - 1).all()
        ours, theirs = (positions, found["cache_lengths"], found), (positions, whole["cache_lengths"], whole)


def test_steps_of_the_whole_cache_append_to_both(engines):
    engine = engines("rocketkv-mt")
    positions, lengths, state = roll_to(engine, prompts_of(120))
    before = state["k_whole.0"].copy()
    after = engine.decode(np.array([5]), positions, lengths, state)
    np.testing.assert_array_equal(after["k_whole.0"][0, :, :120], before[0, :, :120])
    new = after["k_cache.0"][0, :, lengths[0, 0]]
    np.testing.assert_array_equal(after["k_whole.0"][0, :, 120], new)
    assert not after["k_whole.0"][0, :, 121:].any()
