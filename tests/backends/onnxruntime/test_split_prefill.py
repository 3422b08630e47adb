"""The trunk of a prefill graph: equal under every policy, and never cut where nodes hold graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvc_trt import policies
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.accuracy.under_test.policy_engines import open_model
from kvc_trt.backends.onnxruntime.prefill.split_prefill import split_prefill

ROOM = Room(120, 8)


def test_every_method_with_an_engine_has_the_same_trunk():
    """Whatever constants its own part of the graph shares with it."""
    identities = {}
    with open_model("retrieval-tiny") as model:
        for policy in (one.name for one in policies.describe()):
            if not policies.named(policy).selection.oracle:
                variant = Variant(policy, None if policy == "full" else 160)
                identities[policy] = split_prefill(model.program(variant, ROOM).prefill()).identity
    assert len(identities) > 15
    assert len(set(identities.values())) == 1


def test_a_graph_whose_nodes_hold_graphs_is_not_cut():
    from onnx import TensorProto, helper

    branch = helper.make_graph([], "branch", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [])])
    node = helper.make_node("If", ["c"], ["logits"], then_branch=branch, else_branch=branch)
    model = SimpleNamespace(graph=helper.make_graph([node], "g", [], []))
    with pytest.raises(ValueError, match="holds a graph of its own"):
        split_prefill(model)
