"""The standard operators in PyTorch, one by one, against ONNX's own evaluator on the same node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from kvc_trt.backends.torch.nodes.program import NodeProgram, Operators, Scope
from kvc_trt.backends.torch.nodes.standard_operations import OPERATIONS
from kvc_trt.operators import KVC_DOMAIN, OPSET
from kvc_trt.operators.experts import CLAMPED_EXPERTS, EXPERTS, QUANTISED_CLAMPED_EXPERTS, QUANTISED_EXPERTS
from kvc_trt.operators.linear.delta_rule import DELTA_RULE
from kvc_trt.operators.linear.delta_step import DELTA_STEP
from kvc_trt.operators.quantised_linear import QUANTISED_LINEAR, QUANTISED_ROWS
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.operators.shapes import HeadShape, Layout

NUMBERS = {
    "pool_kernel": 7,
    "reallocate": True,
    "budgeted_layers": 3,
    "squeeze_share": 0.35,
}
LAYOUT = Layout(HeadShape(4, 2, 16), 32, 4, "float32", numbers=NUMBERS)
OF_A_GRAPH = {"Constant", "If", "Loop", "Range"}
"""Operators that `NodeProgram` runs itself."""
OF_ITS_DECODER = {
    one.name
    for one in (
        EXPERTS, QUANTISED_EXPERTS, CLAMPED_EXPERTS, QUANTISED_CLAMPED_EXPERTS, QUANTISED_LINEAR, QUANTISED_ROWS
    )
}  # fmt: skip
"""Operators that the torch decoder computes without their bodies."""
OF_REFUSED_LAYERS = {DELTA_RULE.name, DELTA_STEP.name}
"""Operators of linear layers, which the torch backend refuses (decision 0049)."""


def computed(node, inputs):
    program = NodeProgram([node], list(node.output), Operators(LAYOUT, torch.device("cpu")))
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
    return [value.numpy() for value in program.run(Scope(tensors))]


def expected(node, inputs):
    values = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), None)
              for name, value in inputs.items()]  # fmt: skip
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    model = helper.make_model(
        helper.make_graph([node], "one", values, outputs), opset_imports=[helper.make_opsetid("", OPSET)]
    )
    return ReferenceEvaluator(model).run(None, dict(inputs))


def same(op_type, inputs, outputs=1, **attributes):
    given = {f"in{i}": np.asarray(value) for i, value in enumerate(inputs)}
    node = helper.make_node(op_type, list(given), [f"out{i}" for i in range(outputs)], **attributes)
    for found, wanted in zip(computed(node, given), expected(node, given), strict=True):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def operators_in(nodes):
    for node in nodes:
        if node.domain != KVC_DOMAIN:
            yield node.op_type
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from operators_in(attribute.g.node)


@pytest.mark.parametrize("fp8_bounds", [False, True])
@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - OF_ITS_DECODER - OF_REFUSED_LAYERS))
def test_every_operator_that_a_body_uses_is_implemented(name, fp8_bounds):
    used = set(operators_in(OPERATORS[name].body(replace(LAYOUT, fp8_bounds=fp8_bounds)).node))
    assert used <= OPERATIONS.keys() | OF_A_GRAPH


INTS = st.integers(-9, 9)


@settings(max_examples=30)
@given(rows=st.integers(1, 4), width=st.integers(1, 12), largest=st.integers(0, 1), data=st.data())
def test_top_k_breaks_ties_by_the_lower_index(rows, width, largest, data):
    x = np.array(data.draw(st.lists(INTS, min_size=rows * width, max_size=rows * width)), np.float32) / 4
    count = data.draw(st.integers(1, width))
    found = computed(
        helper.make_node("TopK", ["x", "k"], ["values", "places"], largest=largest),
        {"x": x.reshape(rows, width), "k": np.array([count])},
    )
    for row, values, places in zip(x.reshape(rows, width), *found, strict=True):
        ranked = sorted(range(width), key=lambda i, row=row: (-row[i] if largest else row[i], i))[:count]
        assert places.tolist() == ranked
        assert values.tolist() == row[ranked].tolist()


@settings(max_examples=40)
@given(
    start=st.integers(-12, 12), end=st.integers(-12, 12), step=st.sampled_from([1, 2, -1, -3]), axis=st.integers(0, 1)
)  # fmt: skip
def test_slice_equals_numpy_indexing(start, end, step, axis):
    x = np.arange(63, dtype=np.float32).reshape(7, 9)
    if step < 0:
        end = np.iinfo(np.int64).min
    wanted = x[start:end:step] if axis == 0 else x[:, start:end:step]
    if step < 0:
        wanted = x[start::step] if axis == 0 else x[:, start::step]
    node = helper.make_node("Slice", ["x", "starts", "ends", "axes", "steps"], ["y"])
    numbers = {"starts": [start], "ends": [end], "axes": [axis], "steps": [step]}
    (found,) = computed(node, {"x": x, **{name: np.array(value) for name, value in numbers.items()}})
    np.testing.assert_array_equal(found, wanted)


RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4, 5)).astype(np.float32)
WHOLE = RNG.integers(-20, 20, (3, 4))
SINGLE = {
    "reshape keeps and infers": ("Reshape", [X, np.array([0, -1, 5])], {}),
    "expand both ways": ("Expand", [X[:, :1], np.array([3, 1, 5])], {}),
    "unsqueeze from both ends": ("Unsqueeze", [X, np.array([0, -1])], {}),
    "squeeze": ("Squeeze", [X[:1, :, :1], np.array([0, 2])], {}),
    "shape of a part": ("Shape", [X], {"start": 1, "end": -1}),
    "transpose": ("Transpose", [X], {"perm": [0, 3, 1, 2]}),
    "pad some axes": ("Pad", [X, np.array([1, 0, 2, 3]), np.float32(7), np.array([1, 3])], {}),
    "pad whole numbers": ("Pad", [WHOLE, np.array([0, 1, 2, 0]), np.array(2**31 - 1)], {}),
    "pad nothing": ("Pad", [X, np.array([0, 0]), np.float32(0), np.array([2])], {}),
    "concatenate": ("Concat", [X, X[:, :1]], {"axis": 1}),
    "split by sizes": ("Split", [X, np.array([1, 4])], {"axis": 3}),
    "split evenly": ("Split", [X], {"axis": 2, "num_outputs": 2}),
    "gather one": ("Gather", [X, np.array(2)], {"axis": 1}),
    "gather from the end": ("Gather", [X, np.array([[0, -1], [1, 1]])], {"axis": 2}),
    "gather elements": ("GatherElements", [X, RNG.integers(0, 4, (2, 3, 2, 5))], {"axis": 2}),
    "gather by tuples": ("GatherND", [X, RNG.integers(0, 3, (2, 3, 6, 1))], {"batch_dims": 2}),
    "gather by shared rows": ("GatherND", [X, RNG.integers(0, 3, (2, 7, 1))], {"batch_dims": 1}),
    "whole division": ("Div", [np.abs(WHOLE), np.array(3)], {}),
    "remainder has the divisor's sign": ("Mod", [WHOLE, np.array(7)], {}),
    "largest of several": ("Max", [WHOLE, np.array(0), WHOLE[::-1]], {}),
    "smallest": ("Min", [WHOLE, np.array([[3], [-3], [0]])], {}),
    "where": ("Where", [X > 0, X, np.float32(-1)], {}),
    "sum of some axes": ("ReduceSum", [X, np.array([1, 3])], {"keepdims": 0}),
    "sum of all": ("ReduceSum", [WHOLE], {}),
    "greatest of all": ("ReduceMax", [X], {"keepdims": 0}),
    "least": ("ReduceMin", [X, np.array([-1])], {}),
    "sum of 32 bits": ("ReduceSum", [WHOLE.astype(np.int32), np.array([1])], {"keepdims": 0}),
    "mean": ("ReduceMean", [X, np.array([2])], {}),
    "sum of sizes": ("ReduceL1", [X, np.array([2])], {"keepdims": 0}),
    "length": ("ReduceL2", [X, np.array([2, 3])], {}),
    "first of the least": ("ArgMin", [WHOLE // 8], {"axis": 1, "keepdims": 1}),
    "first of the greatest": ("ArgMax", [WHOLE // 8], {"axis": 0, "keepdims": 0}),
    "running sum": ("CumSum", [WHOLE, np.array(1)], {}),
    "running sum of 32 bits": ("CumSum", [WHOLE.astype(np.int32), np.array(1)], {}),
    "running sum before": ("CumSum", [WHOLE, np.array(1)], {"exclusive": 1}),
    "softmax": ("Softmax", [X], {"axis": -1}),
    "widened": ("Cast", [WHOLE], {"to": TensorProto.FLOAT}),
    "like another": ("CastLike", [X, WHOLE], {}),
    "within": ("Clip", [X, np.float32(-0.5), np.float32(0.5)], {}),
    "one scattered": ("ScatterND", [X, np.array([[1, 2], [0, 0]]), RNG.random((2, 4, 5)).astype(np.float32)], {}),
    "greatest scattered": (
        "ScatterND", [WHOLE, np.array([[0, 1], [2, 3], [0, 1]]), np.array([5, -30, 9])], {"reduction": "max"}
    ),
    "elements scattered": ("ScatterElements", [X, RNG.integers(0, 4, (2, 3, 1, 5)), X[:, :, :1] + 1], {"axis": 2}),
    "greatest elements": (
        "ScatterElements", [X, RNG.integers(0, 4, (2, 3, 1, 5)), X[:, :, :1] + 1], {"axis": 2, "reduction": "max"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SINGLE)
def test_a_node_gives_what_onnx_says(name):
    op_type, inputs, attributes = SINGLE[name]
    same(op_type, inputs, outputs=2 if op_type == "Split" else 1, **attributes)


@settings(max_examples=20)
@given(width=st.sampled_from([1, 3, 7, 31]), length=st.integers(1, 40))
def test_pooling_takes_the_greatest_of_the_neighbours_that_are_there(width, length):
    x, reach = np.random.default_rng(length).standard_normal((2, 3, length)).astype(np.float32), width // 2
    node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[width], pads=[reach, reach])
    wanted = [x[..., max(0, i - reach) : i + reach + 1].max(axis=-1) for i in range(length)]
    np.testing.assert_array_equal(computed(node, {"x": x})[0], np.stack(wanted, axis=-1))
