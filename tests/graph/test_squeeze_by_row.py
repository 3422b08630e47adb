"""SqueezeAttention, Algorithm 1 (arXiv 2404.04793), for each prompt with the policies that evict at every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import policies
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.every_policy import parameters_of
from tests.graph.small_models import LLAMA, SmallEngine, make_small_engine, prompts_of

MODEL = replace(LLAMA, num_hidden_layers=5)
POLICIES = ("sliding-window", "streaming-llm", "h2o", "tova")
STEPS = 24


def algorithm_1(cosines: list[float], budget: int, share: float, cap: int) -> list[int]:
    """Lines 6 to 12 for few layers, without the project's code: every division into three groups is tried.

    Whole tokens go to the layers of lowest cosine first. Layers stop at `cap`, and what they cannot take goes to the
    others in the same order."""
    order = sorted(range(len(cosines)), key=lambda layer: cosines[layer])
    values = np.array([cosines[layer] for layer in order])

    def spread(group: np.ndarray) -> float:
        return float(((group - group.mean()) ** 2).sum())

    cuts = [(i, j) for i in range(1, len(values)) for j in range(i + 1, len(values))]
    first = min(cuts, key=lambda cut: sum(spread(group) for group in np.split(values, cut)))[1]
    low = int(budget * share)
    rest = len(values) * budget - (len(values) - first) * low
    given = [rest // first + (place < rest % first) for place in range(first)] + [low] * (len(values) - first)
    over = sum(max(0, tokens - cap) for tokens in given)
    budgets = [0] * len(values)
    for place, tokens in enumerate(given):
        held = min(tokens, cap)
        more = min(over, cap - held)
        budgets[order[place]], over = held + more, over - more
    return budgets


def budgets_of(policy: str, prompt: np.ndarray) -> list[int]:
    """Budgets of the layers for one prompt, by the cosines of the whole model."""
    rule, whole = (
        parameters_of(name, MODEL, max_output_len=64) for name in (f"{policy}, budgets from the prompt", "full")
    )
    decoder = ReferenceDecoder(MODEL, RandomWeights(MODEL, 0), method=policies.method(whole), parameters=whole)
    cosines = decoder.layer_cosines(torch.from_numpy(prompt)[None], torch.tensor([len(prompt)]))
    cap = min(2 * rule.token_budget, rule.max_sequence_len)
    return algorithm_1(cosines[:, 0].tolist(), rule.token_budget, 0.35, cap)


def engine_of(policy: str, directory: str, **changes: Any) -> SmallEngine:
    rule = parameters_of(f"{policy}, budgets from the prompt", MODEL, max_output_len=64, **changes)
    return make_small_engine(Path(directory), rule, model=MODEL)


def calibrated(policy: str, budgets: list[int], directory: str) -> SmallEngine:
    """Return an engine of another path: each layer's cache is allocated at its own size."""
    settings_of = {"layer_budget": "squeeze", "layer_budgets": budgets}
    rule = parameters_of(policy, MODEL, max_output_len=64, **settings_of)
    return make_small_engine(Path(directory), rule, model=MODEL)


def greedy(engine: SmallEngine, prompts: list[np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the tokens [steps,B] and the state after them."""
    state = engine.prefill(prompts)
    lengths, places = state["cache_lengths"], np.array([len(prompt) for prompt in prompts])
    tokens = []
    for step in range(STEPS):
        tokens.append(state["logits"].argmax(-1))
        state = engine.decode(tokens[-1], places + step, lengths + step, state)
    return np.array(tokens), state


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_budgets_tokens_and_kept_positions_are_those_of_algorithm_1(policy: str) -> None:
    """Budgets by brute force from the cosines; then an engine whose layers have just these sizes."""
    prompts = prompts_of(200, 120, 33, seed=3)
    with TemporaryDirectory() as directory:
        engine = engine_of(policy, directory)
        together, state = greedy(engine, prompts)
        spare = engine.parameters.spare_slots
        slots = np.stack([state[f"cache_capacities.{layer}"].ravel() for layer in range(MODEL.num_hidden_layers)])
        for row, prompt in enumerate(prompts):
            budgets = budgets_of(policy, prompt)
            assert (slots[:, row] - spare).tolist() == budgets
            alone, _ = greedy(engine, [prompt])
            with TemporaryDirectory() as other:
                expected, cut = greedy(calibrated(policy, budgets, other), [prompt])
            assert together[:, row].tolist() == alone[:, 0].tolist() == expected[:, 0].tolist()
            for layer, budget in enumerate(budgets):
                used = budget + spare
                if f"slot_positions.{layer}" in cut:
                    ours, theirs = (np.sort(one[f"slot_positions.{layer}"][place], axis=-1)[:, -used:]
                                    for one, place in ((state, row), (cut, 0)))  # fmt: skip
                    assert (ours == theirs).all()
                np.testing.assert_allclose(
                    state[f"k_cache.{layer}"][row, :, :used], cut[f"k_cache.{layer}"][0], atol=1e-4
                )


@pytest.mark.slow
@settings(deadline=None, max_examples=6)
@given(
    st.sampled_from(POLICIES), st.sampled_from(["auto", "int8", "k8v4"]),
    st.lists(st.integers(1, 250), min_size=1, max_size=3), st.integers(0, 99),
)  # fmt: skip
def test_rows_of_any_lengths_keep_what_the_reference_keeps(
    policy: str, kv_cache: str, lengths: list[int], seed: int
) -> None:
    prompts = prompts_of(*lengths, seed=seed)
    with TemporaryDirectory() as directory:
        engine = engine_of(policy, directory, kv_cache=kv_cache)
        rule = engine.parameters
        decoder = ReferenceDecoder(MODEL, RandomWeights(MODEL, 0), method=policies.method(rule), parameters=rule)
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.from_numpy(prompt)
        _, reference = decoder.prefill(ids, torch.tensor(lengths))
        state = engine.prefill(prompts)
        for layer, cache in enumerate(reference.caches):
            assert (state[f"cache_capacities.{layer}"].ravel() - rule.spare_slots).tolist() == cache.budgets
            assert (state["cache_lengths"][layer] == cache.lengths.numpy()).all()
            assert cache.indices is not None
            width = cache.indices.shape[2]
            assert (state[f"indices.{layer}"][:, :, :width] == cache.indices.numpy()).all()
