"""The schemas of the plugins against the graphs of an engine. Needs neither TensorRT nor a compiler."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest

from kvc_trt.graph.state import state_tensors
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.registry import KERNEL_OPERATORS, OPERATORS
from kvc_trt.operators.schema import INT8, INT32, INT64, PLUGIN_ATTRIBUTES, Operator
from tests.graph.small_models import LLAMA, make_small_engine, resolve

POLICIES = ("full", "rocketkv", "snapkv++", "hybrid", "snapkv-gqa")
PLUGINS = {operator.name: operator for operator in KERNEL_OPERATORS}
OF_TURNS = {
    "KvcAppendBlock", "KvcRaiseBounds", "KvcJoinBlock", "KvcCompactTurn", "KvcReplaceCache", "KvcReplaceBounds"
}  # fmt: skip
"""Operators in no graph of a prompt or a step; tests/backends/tensorrt/test_turns.py has the lowered extend graphs."""
ONNX_TYPES = {INT64: onnx.TensorProto.INT64, INT32: onnx.TensorProto.INT32, INT8: onnx.TensorProto.INT8}
FP8_SUFFIX = " in fp8"
FP8 = f"rocketkv{FP8_SUFFIX}"


@pytest.fixture(scope="module")
def graphs(tmp_path_factory) -> dict[str, list[onnx.ModelProto]]:
    """Both graphs of a small model under every policy, its first layer skipped; one with bounds in fp8 too."""
    built = {}
    for policy in (*POLICIES, FP8):
        engine = make_small_engine(tmp_path_factory.mktemp("engine"), _parameters(policy))
        built[policy] = [engine.prefill_model, engine.decode_model]
    return built


def _parameters(policy: str) -> PolicyParameters:
    parameters = resolve(policy.removesuffix(FP8_SUFFIX), skip_layers=1)
    return replace(parameters, fp8_bounds=policy.endswith(FP8_SUFFIX))


def plugin_nodes(graphs) -> list[tuple[onnx.ModelProto, onnx.NodeProto]]:
    nodes = [(model, node) for models in graphs.values() for model in models for node in model.graph.node]
    return [(model, node) for model, node in nodes if node.domain == KVC_DOMAIN and node.op_type in PLUGINS]


def called(node: onnx.NodeProto) -> Operator:
    """Return the operator in the form that a node's attributes name."""
    return PLUGINS[node.op_type].for_numbers({a.name: a.i for a in node.attribute})


def body_of(model: onnx.ModelProto, name: str) -> onnx.FunctionProto:
    return next(body for body in model.functions if body.name == name)


def test_the_nodes_of_every_policy_carry_these_fields_and_no_others(graphs):
    nodes = plugin_nodes(graphs)
    assert {node.op_type for _, node in nodes} == set(PLUGINS) - OF_TURNS
    for _, node in nodes:
        attributes = {a.name: a for a in node.attribute if a.name not in PLUGIN_ATTRIBUTES}
        fields = {one.name: one for one in called(node).attributes}
        assert set(attributes) == set(fields)
        for name, field in fields.items():
            # The parser makes one INT32 of an INT and keeps the low half, whatever the high half is.
            assert attributes[name].type == onnx.AttributeProto.INT
            assert -(2**31) < field.least <= attributes[name].i <= field.most < 2**31


def test_the_nodes_name_the_namespace_and_version_of_the_creators(graphs):
    for _, node in plugin_nodes(graphs):
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for name, value in PLUGIN_ATTRIBUTES.items():
            assert attributes[name].decode() == value


def test_every_node_has_the_tensors_that_its_plugin_expects(graphs):
    """TensorRT refuses a node whose outputs are not as many as the plugin's."""
    for model, node in plugin_nodes(graphs):
        operator, body = called(node), body_of(model, node.op_type)
        assert len(node.input) == len(operator.inputs)
        assert len(node.output) == len(operator.outputs)
        assert list(body.output) == [tensor.name for tensor in operator.outputs]


def test_tensors_have_the_types_and_ranks_that_onnx_infers(graphs):
    checked = 0
    for models in graphs.values():
        for model in models:
            inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
            values = [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]
            types = {value.name: value.type.tensor_type for value in values}
            for node in model.graph.node:
                if node.domain != KVC_DOMAIN or node.op_type not in PLUGINS:
                    continue
                operator, attributes = called(node), {a.name: a.i for a in node.attribute}
                for name, row in zip([*node.input, *node.output], operator.tensors, strict=True):
                    expected = ONNX_TYPES.get(operator.element_of(row, attributes), onnx.TensorProto.FLOAT)
                    assert types[name].elem_type == expected, (node.name, row.name)
                    if types[name].HasField("shape"):
                        assert len(types[name].shape.dim) == len(row.shape), (node.name, row.name)
                        checked += 1
    assert checked > 100


@pytest.mark.parametrize("policy", ["rocketkv", FP8])
def test_state_tensors_have_the_shapes_of_the_schema(policy):
    """A symbol means the same size in an engine's state and in the plugins."""
    parameters = _parameters(policy)
    rows = {row.name: row for row in PLUGINS["KvcHybridAttention"].inputs}
    sizes = {"G": 2, "D": 16, "C": parameters.capacity, "2D": 32, "P": parameters.stored_pages("float16")}
    tensors = [tensor for tensor in state_tensors(LLAMA, parameters, "float16") if tensor.layer == 1]
    assert len(tensors) == 3
    for tensor in tensors:
        row = rows[tensor.name.split(".")[0]]
        assert row.shape[0] == "B"
        assert tuple(sizes[symbol] for symbol in row.shape[1:]) == tensor.shape


@pytest.mark.parametrize("operator", KERNEL_OPERATORS, ids=lambda operator: operator.name)
def test_outputs_written_in_place_are_the_inputs_of_that_name(operator: Operator):
    inputs = {tensor.name: tensor for tensor in operator.inputs}
    for row in operator.outputs:
        if row.name.endswith("_out"):
            assert row.alias is not None
            written = inputs[row.alias]
            assert (f"{written.name}_out", written.element, written.shape) == (row.name, row.element, row.shape)
        else:
            assert row.alias is None


def test_aliases_are_those_of_the_engines_state(graphs):
    """Each output that an engine binds to an input's buffer is aliased to that input by the node's plugin."""
    aliased = 0
    for policy, (_, decode) in graphs.items():
        tensors = state_tensors(LLAMA, _parameters(policy), "float32")
        inputs_of = {tensor.aliased_output: tensor.name for tensor in tensors}
        for node in decode.graph.node:
            if node.domain != KVC_DOMAIN:
                continue
            for name, row in zip(node.output, OPERATORS[node.op_type].outputs, strict=True):
                expected = inputs_of.pop(name, None)
                names = [tensor.name for tensor in OPERATORS[node.op_type].inputs]
                assert (None if row.alias is None else node.input[names.index(row.alias)]) == expected
                aliased += expected is not None
        assert not inputs_of
    assert aliased > 30
