from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from kvc_trt.graph import IR_VERSION
from kvc_trt.operators import OPSET
from kvc_trt.operators.emitter import Emitter
from tests.graph.small_models import open_session


def run(emit, inputs, outputs):
    values = [helper.make_tensor_value_info(name, TensorProto.INT64, None) for name in inputs]
    graph = helper.make_graph(emit.nodes, "g", values, [helper.make_empty_tensor_value_info(o) for o in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return open_session(model).run(outputs, inputs)


def test_constants_are_written_once_and_keep_their_types():
    emit = Emitter()
    assert emit.constant(1) == emit.constant(1) != emit.constant(1.0)
    assert emit.constant([1]) != emit.constant(1)
    assert emit.constant(np.float16(1)) != emit.constant(1.0)
    assert [node.op_type for node in emit.nodes] == ["Constant"] * 4


def test_a_branch_sees_the_constants_and_values_around_it():
    emit = Emitter()
    outside = emit.Add("x", 5)
    condition = emit.Greater("x", 0)
    result = emit.choose(condition, lambda b: [b.Add(outside, 5)], lambda b: [b.Identity(outside)], outputs=1)
    assert run(emit, {"x": np.array(1)}, [result])[0] == 11
    assert run(emit, {"x": np.array(-1)}, [result])[0] == 4


def test_collect_stacks_iterations():
    emit = Emitter()
    result = emit.collect("count", lambda body, iteration: body.Mul(iteration, 3))
    np.testing.assert_array_equal(run(emit, {"count": np.array(4)}, [result])[0], [0, 3, 6, 9])


def test_scopes_name_nodes_and_end():
    emit = Emitter()
    with emit.scope("layers.0"):
        assert emit.Neg("x").startswith("layers.0/Neg_")
    assert "/" not in emit.Neg("x")


def test_only_operators_are_callable():
    with pytest.raises(AttributeError):
        Emitter().not_an_operator  # noqa: B018
