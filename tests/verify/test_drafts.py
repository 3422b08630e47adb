"""The draft graph under verification: honest engines pass, and whatever is wrong in it or in taking back fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt.backends.onnxruntime.draft_pass import DraftPass
from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.progress import NullProgress
from kvc_trt.verify.engine_under_test import EngineUnderTest
from kvc_trt.verify.plan import make_plan
from kvc_trt.verify.rungs.drafts import check_drafts
from kvc_trt.verify.thresholds import thresholds_for
from tests.plugins_cuda.conftest import one_thread

__all__ = ["one_thread"]

TOKENS = 3
"""Tokens in a draft."""
POLICIES = (
    "full", "rocketkv, a skipped layer", "rocketkv-mt", "hybrid", "quest", "quest-matched", "sparq", "snapkv",
    "keydiff", "expected-attention-hybrid, no sinks", "rocketkv, bounds in fp8",
)  # fmt: skip
READ, ERROR, LEFT = "drafts: tokens read", "drafts: max logit error", "drafts: traces of a rejection"


def drafts_of(engine, backend="onnxruntime", steps=14, **changes):
    plan = replace(make_plan("logits", engine.model, engine.parameters, steps=steps), **changes)
    target = harness_for(engine, RunOptions(backend, 1))
    tested = EngineUnderTest(engine, target, plan, thresholds_for("fp32"), NullProgress())
    return {check.name: check for check in check_drafts(tested)}


def failed(engine, **options):
    return {name for name, check in drafts_of(engine, **options).items() if not check.passed}


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_of_an_honest_engine_pass(policy, make_engine, parameters_for):
    engine = make_engine(parameters_for(policy), drafts=TOKENS)
    found = drafts_of(engine)
    assert (READ in found) == engine.parameters.reads_a_part
    assert {ERROR, LEFT} <= found.keys()
    assert all(check.passed for check in found.values()), found


def test_every_place_of_a_draft_is_judged(make_engine, parameters_for):
    """Passes keep 1, 2, 3, 4 and 1 of 14 tokens; each rejection of the first ones is made twice and compared."""
    engine = make_engine(parameters_for("rocketkv"), drafts=TOKENS)
    found = drafts_of(engine)
    assert "x 11 tokens" in found[ERROR].sample
    assert found[ERROR].note.startswith("5 passes")
    rows, caches, kept = 4, 2, 11
    assert found[READ].sample == f"{rows * caches * engine.model.num_key_value_heads * kept} lists"


def test_drafts_in_torch_are_judged_by_logits_alone(make_engine, parameters_for):
    found = drafts_of(make_engine(parameters_for("rocketkv"), drafts=TOKENS), "torch")
    assert found.keys() == {ERROR, LEFT}
    assert all(check.passed for check in found.values()), found


def _lengths_without_drafts(name, graph):
    """Let every token be stored where the first one goes."""
    if name == "draft":
        for node in graph.graph.node:
            if node.op_type == "KvcHybridAttention" and "token" not in node.output[0]:
                first = next(other for other in graph.graph.node if other.op_type == node.op_type)
                node.input[6] = first.input[6]


def _all_at_the_first_position(name, graph):
    if name == "draft":
        for node in graph.graph.node:
            if node.op_type == "Add" and node.input[0] == "positions":
                node.input[1] = "no_places"
        zero = _constant("no_places", np.zeros((1 + TOKENS, 1), np.int64))
        graph.graph.node.insert(0, zero)


def _constant(name, array):
    from onnx import helper, numpy_helper

    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))


@pytest.mark.slow
@pytest.mark.parametrize("edit", [_lengths_without_drafts, _all_at_the_first_position])
def test_a_wrong_draft_graph_is_caught(edit, make_engine, parameters_for):
    engine = make_engine(parameters_for("rocketkv"), drafts=TOKENS, edit=edit)
    assert failed(engine)


def test_a_wrong_selection_is_caught_by_the_tokens_read(make_engine, parameters_for):
    claimed = parameters_for("rocketkv")

    def edit(name, graph):
        if name == "draft":
            for node in graph.graph.node:
                for attribute in (one for one in node.attribute if one.name == "top_k"):
                    attribute.i -= 2

    assert READ in failed(make_engine(claimed, drafts=TOKENS, edit=edit))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rocketkv", "sparq"])
def test_drafts_not_taken_back_are_caught(policy, make_engine, parameters_for, monkeypatch):
    engine = make_engine(parameters_for(policy), drafts=TOKENS)
    assert not failed(engine)
    monkeypatch.setattr(DraftPass, "take_back", lambda *arguments: None)
    assert LEFT in failed(engine)


def test_bounds_that_are_taken_back_too_far_are_caught(make_engine, parameters_for, monkeypatch):
    """Both passes then leave equal state, so the later reads and logits have to show the mistake."""
    engine = make_engine(parameters_for("rocketkv"), drafts=TOKENS)
    whole = DecodeSelection.take_back

    def too_far(self, state, saved, before, steps, rule):
        whole(self, state, saved, before, steps, rule)
        state["bounds"][:, :, -(-before // rule.page_size) - 1 :] = state["bounds"].min()

    monkeypatch.setattr(DecodeSelection, "take_back", too_far)
    assert READ in failed(engine)


def test_engines_without_drafts_or_with_too_long_ones_are_not_checked(make_engine, parameters_for):
    assert drafts_of(make_engine(parameters_for("rocketkv"))) == {}
    assert drafts_of(make_engine(parameters_for("rocketkv"), drafts=TOKENS), steps=TOKENS) == {}
    assert drafts_of(make_engine(parameters_for("full"), drafts=TOKENS), limited=True) == {}
