"""Engines that compress each prompt by its own length: prompts, steps and turns equal the reference decoder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt.methods.base.parameters import PolicyParameters
from tests.graph.small_models import make_small_engine, prompts_of, resolve
from tests.graph.test_extend import check, conversation

LENGTHS = (250, 60, 32, 20, 3)
"""Prompts far over the token budget of 32, just over it, at it, under it, and shorter than the window."""
TURNS = ((1, 40, 9, 1, 30), (33, 1, 60, 8, 2))


def parameters_of(policy: str) -> PolicyParameters:
    """Return the policy with two pool kernels, which its turns reach too: from 64 tokens on the wider one."""
    numbers = {"max_conversation_len": 450, "window": 8, "pool_kernel": 15, "by_length": True}
    return replace(resolve(policy, **numbers), long_prompt=64, short_pool_kernel=5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rocketkv", "rocketkv-v1", "snapkv++", "rocketkv-mt"])
def test_rows_of_every_length_equal_the_reference(tmp_path, policy: str) -> None:
    rule = parameters_of(policy)
    engine = make_small_engine(tmp_path, rule, turns=True)
    kept = [rule.kept_of(n) for n in LENGTHS]
    assert kept[0] < LENGTHS[0]
    assert kept[1] < LENGTHS[1]
    assert kept[2:] == list(LENGTHS[2:])
    stored = []
    for result, logits, cache in conversation(engine, prompts_of(*LENGTHS), TURNS):
        check(engine, result, logits, cache)
        if "cache_lengths" in result:
            stored.append(result["cache_lengths"][0].tolist())
    assert stored[0] == kept
    texts = np.array(LENGTHS)
    for before, turn, after in zip(stored, TURNS, stored[1:], strict=False):
        texts = texts + 2 + turn  # two steps, then the turn
        joined = texts if rule.keeps_whole else np.array(before) + 2 + turn
        assert after == [
            min(count, rule.kept_after(n)) for count, n in zip(joined.tolist(), texts.tolist(), strict=True)
        ]


def test_each_compacting_graph_has_one_table_of_budgets_by_length(tmp_path) -> None:
    """One table of lengths in each graph that compacts, whatever the number of layers; none where rows are alike."""
    rule = parameters_of("rocketkv")
    engine = make_small_engine(tmp_path, rule, turns=True)
    for graph, budgets in ((engine.prefill_model, rule.budgets), (engine.extend_model, rule.budgets_of_turns)):
        tables = [table for table in constants_of(graph) if table.shape == (rule.max_input_len + 1,)]
        assert [table.tolist() for table in tables] == [budgets.tolist()]
    assert not [table for table in constants_of(engine.decode_model) if table.size > rule.max_input_len]


def constants_of(model) -> list[np.ndarray]:
    from onnx import numpy_helper

    return [numpy_helper.to_array(node.attribute[0].t) for node in model.graph.node if node.op_type == "Constant"]
