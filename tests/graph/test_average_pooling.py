"""Engines that pool votes by averages: prompts, steps and turns equal the reference decoder."""

from __future__ import annotations

import pytest

from tests.graph.small_models import make_small_engine, prompts_of, resolve
from tests.graph.test_extend import check, conversation

LENGTHS, TURNS = (250, 60, 3), ((1, 40, 9),)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rocketkv", "rocketkv-mt", "snapkv", "pyramidkv"])
def test_prompts_steps_and_turns_equal_the_reference(tmp_path, policy: str) -> None:
    numbers = {"token_budget": 96} if policy in ("snapkv", "pyramidkv") else {"by_length": False}
    rule = resolve(policy, **numbers, max_conversation_len=450, window=8, pool_kernel=5, pool_kind="avg")
    assert rule.pool_kind == "avg"
    assert rule.eviction.describe(rule).startswith("window 8, pool kernel 5, averages")
    engine = make_small_engine(tmp_path, rule, turns=True)
    for result, logits, cache in conversation(engine, prompts_of(*LENGTHS), TURNS):
        check(engine, result, logits, cache)
