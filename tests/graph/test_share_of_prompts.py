"""Engines of SnapKV that keep a share of each prompt: prompts, steps and turns equal the reference decoder."""

from __future__ import annotations

import pytest

from tests.graph.small_models import make_small_engine, prompts_of, resolve
from tests.graph.test_extend import check, conversation

LENGTHS, TURNS = (250, 60, 9, 3), ((1, 40, 9, 30),)


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-gqa"])
def test_each_row_keeps_its_own_share_of_its_prompt(tmp_path, policy: str) -> None:
    rule = resolve(policy, token_budget="20%", max_conversation_len=450, window=8, pool_kernel=5)
    engine = make_small_engine(tmp_path, rule, turns=True)
    stored = []
    for result, logits, cache in conversation(engine, prompts_of(*LENGTHS), TURNS):
        check(engine, result, logits, cache)
        if "cache_lengths" in result:
            stored.append(result["cache_lengths"][0].tolist())
    assert stored[0] == [56, 18, 8, 3]  # 8 + floor((n - 8) / 5)
    # Two steps and the turn: texts of 253, 102, 20 and 35 tokens, of which at most 250 count.
    assert stored[1] == [56, 26, 10, 13]
