"""The extend graph under verification: honest engines pass, and whatever is wrong in it fails a check."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.methods.base.registry import operators
from kvc_trt.progress import NullProgress
from kvc_trt.verify.engine_under_test import EngineUnderTest
from kvc_trt.verify.plan import make_plan
from kvc_trt.verify.rungs.turns import check_turns
from kvc_trt.verify.thresholds import thresholds_for
from tests.plugins_cuda.conftest import one_thread
from tests.verify.test_ops import Damaged, failing

__all__ = ["one_thread"]

POLICIES = (
    "full", "rocketkv, a skipped layer", "sparq", "h2o", "tova", "streaming-llm", "keydiff",
    "expected-attention-hybrid, no sinks", "snapkv", "rocketkv-mt", "rocketkv, bounds in fp8", "quest, bounds in fp8",
)  # fmt: skip


def turns_of(engine, backend="onnxruntime", **changes):
    plan = replace(make_plan("logits", engine.model, engine.parameters), **changes)
    target = harness_for(engine, RunOptions(backend, 1))
    tested = EngineUnderTest(engine, target, plan, thresholds_for("fp32"), NullProgress())
    return {check.name: check.passed for check in check_turns(tested)}


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_of_an_honest_engine_pass(policy, make_engine, parameters_for):
    engine = make_engine(parameters_for(policy), turns=True)
    found = turns_of(engine)
    assert found["turns: max logit error"]
    assert ("turns: tokens kept" in found) == bool(engine.parameters.eviction.turn_state)
    assert all(found.values())


def test_logits_of_every_token_are_judged_if_the_engine_has_them(make_engine, parameters_for):
    claimed = parameters_for("rocketkv")
    assert all(turns_of(make_engine(claimed, turns=True, all_logits=True)).values())

    def forget_the_first_token(name, graph):
        """Give the logits of the second token twice: the last ones stay right."""
        if name == "extend":
            (head,) = [node for node in graph.graph.node if "logits" in node.output]
            head.output[0] = "right"
            graph.graph.node.extend(_shifted())

    assert not turns_of(make_engine(claimed, turns=True, all_logits=True, edit=forget_the_first_token))[
        "turns: max logit error"
    ]


def _shifted():
    from onnx import helper, numpy_helper

    def constant(name, values):
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(values, np.int64)))

    return [
        constant("one", [1]), constant("two", [2]), constant("end", [1 << 40]), constant("axis", [1]),
        helper.make_node("Slice", ["right", "one", "two", "axis"], ["second"]),
        helper.make_node("Slice", ["right", "one", "end", "axis"], ["others"]),
        helper.make_node("Concat", ["second", "others"], ["logits"], axis=1),
    ]  # fmt: skip


def test_turns_in_torch_are_judged(make_engine, parameters_for):
    found = turns_of(make_engine(parameters_for("rocketkv"), turns=True), "torch")
    assert found == {"turns: max logit error": True, "turns: tokens kept": True}


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_output_of_every_operator_of_a_turn_is_checked(policy, make_engine, parameters_for):
    engine = make_engine(parameters_for(policy), turns=True)
    target = harness_for(engine, RunOptions("onnxruntime", 1))
    assert failing(engine, target) == set()
    own = [operator for operator in target.operators() if not operators()[operator.name].native]
    assert own
    for operator in own:
        for index, output in enumerate(operators()[operator.name].outputs):
            if output.name == "bounds" and not engine.parameters.has_pages:
                continue  # nobody reads them
            damaged = Damaged(operator, index, "one more")
            failed = failing(engine, SimpleNamespace(truncates=False, operators=lambda damaged=damaged: [damaged]))
            assert any(name.startswith(operator.name) for name in failed), f"{operator.name}, {output.name}"


def _forget_the_window(name, graph):
    """Protect as many tokens as the turn has, not as the window has."""
    if name == "extend":
        for node in graph.graph.node:
            if node.op_type == "KvcCompactTurn":
                node.input[4] = "lengths"


def _swap(name, graph):
    if name == "extend":
        for node in graph.graph.node:
            if node.op_type == "KvcExtendAttention":
                node.input[1], node.input[2] = node.input[2], node.input[1]


def _attend_before_the_turn(name, graph):
    """Let queries see only the stored tokens and the first new token."""
    if name == "extend":
        for node in graph.graph.node:
            if node.op_type == "KvcJoinBlock":
                node.input[5] = "ones"
        graph.graph.node.insert(0, _ones())


def _ones():
    from onnx import helper

    return helper.make_node("Div", ["lengths", "lengths"], ["ones"])


@pytest.mark.parametrize("edit", [_swap, _attend_before_the_turn, _forget_the_window])
def test_a_wrong_extend_graph_is_caught(edit, make_engine, parameters_for):
    engine = make_engine(parameters_for("rocketkv", window=8), edit=edit, turns=True)
    assert not all(turns_of(engine).values())


def test_a_compaction_to_another_budget_is_caught(make_engine, parameters_for):
    claimed = parameters_for("rocketkv")
    other = replace(claimed, pool_kernel=21)
    engine = make_engine(claimed, edit=None, built=other, turns=True)
    assert not all(turns_of(engine).values())


def test_engines_without_turns_or_too_long_ones_are_not_checked(make_engine, parameters_for):
    assert turns_of(make_engine(parameters_for("rocketkv"))) == {}
    assert turns_of(make_engine(parameters_for("full", max_output_len=1), turns=True)) == {}
    assert turns_of(make_engine(parameters_for("full"), turns=True), limited=True) == {}
