"""Limits at which one method is another: a budget of the whole sequence, one query head per KV head, no sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvc_trt import policies
from kvc_trt.reference.cache import ReferenceCache

NEW, PROMPTS = 6, (90, 41)
SMALL = {"window": 8, "pool_kernel": 5}
POLICIES = [one.name for one in policies.describe() if one.name != "full"]


def run(pair: Any, policy: str, budget: int, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Tensor, Any]:
    """Logits [steps,B,vocab] of two prompts of unequal length, and the state after the last step."""
    generator = torch.Generator().manual_seed(17)
    ids = torch.randint(0, pair.config.vocab_size, (len(PROMPTS), max(PROMPTS) + NEW), generator=generator)
    decoder = pair.decoder(policy, budget, max(PROMPTS), NEW, dtype, **{**policies.applicable(policy, SMALL), **more})
    first, cache = decoder.prefill(ids[:, : max(PROMPTS)], torch.tensor(PROMPTS))
    return torch.stack([first, *(decoder.decode(column, cache) for column in ids[:, max(PROMPTS) :].T)]), cache


def stored(cache: ReferenceCache) -> list[list[int]]:
    """Return the positions that every cache, row and head holds."""
    rows = []
    for one in cache.caches:
        assert one.positions is not None
        for b, length in enumerate(one.lengths.tolist()):
            rows += one.positions[b, :, :length].tolist()
    return rows


@pytest.mark.parametrize("name", ["llama", "longchat"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_of_the_whole_sequence_is_dense_bit_for_bit(
    policy: str, name: str, family: Callable[..., Any]
) -> None:
    """SnapKV divides the budget by the heads of a group: with grouped queries it needs as many times the prompt."""
    pair = family(name)
    alone = policy == "snapkv" and name == "llama"
    expected, _ = run(pair, "full", 16)
    found, cache = run(pair, policy, NEW + 3 * max(PROMPTS) if alone else NEW + max(PROMPTS))
    if alone:  # three products of one row each, where the full cache has one of three rows
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, expected)
    assert {len(row) for row in stored(cache)} == {n + NEW for n in PROMPTS}


STAGES = {"page_size": 2, "top_r": 5, "top_k": 20}
SQUEEZED, RANKED = {"layer_budget": "squeeze"}, {"positions": "cache"}
TWINS: dict[str, tuple[str, int, dict[str, Any], str, int, dict[str, Any]]] = {
    "SnapKV with one query head per KV head": ("snapkv", 40, {}, "snapkv-gqa", 40, {}),
    "exact top-k with one query head per KV head": ("exact-topk", 40, {}, "exact-topk-group", 40, {}),
    "no sinks": ("sliding-window", 40, {}, "streaming-llm", 40, {"sinks": 0}),
    "no sinks, rotated by rank": ("sliding-window", 40, RANKED, "streaming-llm", 40, {"sinks": 0, **RANKED}),
    "no retrieval heads": ("duo-attention", 40, {}, "streaming-llm", 40, {"sinks": 8}),
    "retrieval heads only": ("duo-attention", 700, {"head_scores": [[0.5] * 6] * 3}, "full", 16, {}),
    "no heavy hitters": ("h2o", 40, {"recent": 40}, "h2o", 40, {"recent": 40, **SQUEEZED, "layer_budgets": (40,) * 3}),
    "nothing evicted": ("rocketkv", 40, {"prompt_budget": 90, **STAGES}, "hybrid", 40, STAGES),
    "everything read": ("rocketkv", 40, {"top_k": 96}, "snapkv++", 40, {}),
    "every channel": ("quest-matched", 40, {"page_size": 2}, "hybrid", 40, {**STAGES, "top_r": 8}),
    "equal budgets": ("snapkv-gqa", 40, {**SQUEEZED, "layer_budgets": (34,) * 3}, "snapkv-gqa", 40, {}),
    "no steps in the pyramid": ("pyramidkv", 70, {}, "snapkv-gqa", 70, {}),
}  # fmt: skip


@pytest.mark.parametrize("limit", TWINS)
def test_two_methods_coincide_at_a_limit_bit_for_bit(limit: str, family: Callable[..., Any]) -> None:
    policy, budget, settings, other, other_budget, other_settings = TWINS[limit]
    pair = family("longchat")
    found, cache = run(pair, policy, budget, torch.float64, **settings)
    expected, other_cache = run(pair, other, other_budget, torch.float64, **other_settings)
    assert torch.equal(found, expected)
    assert stored(cache) == stored(other_cache)
