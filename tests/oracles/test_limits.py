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
    """The positions that every cache, row and head holds."""
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
    pair = family(name)
    expected, _ = run(pair, "full", 16)
    found, cache = run(pair, policy, max(PROMPTS) + NEW)
    assert torch.equal(found, expected)
    assert {len(row) for row in stored(cache)} == {n + NEW for n in PROMPTS}
