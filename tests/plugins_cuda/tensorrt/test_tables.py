"""The tables of the plugins against the graphs of an engine. Needs neither TensorRT nor a compiler."""

from __future__ import annotations

import re

import onnx
import pytest

from kvc_trt.graph.state import state_tensors
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.operators.schema import PLUGIN_ATTRIBUTES
from tests.graph.small_models import LLAMA, make_small_engine, resolve
from tests.plugins_cuda.tensorrt.tables import FILES, Table, read_table
from tests.plugins_cuda.tensorrt.toolchain import SOURCES

POLICIES = ("full", "rocketkv", "snapkv++", "hybrid", "snapkv-gqa")
ONNX_TYPES = {"kInt64": onnx.TensorProto.INT64, "kInt32": onnx.TensorProto.INT32}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory) -> dict[str, list[onnx.ModelProto]]:
    """Both graphs of a small model under every policy, its first layer skipped."""
    built = {}
    for policy in POLICIES:
        engine = make_small_engine(tmp_path_factory.mktemp("engine"), resolve(policy, skip_layers=1))
        built[policy] = [engine.prefill_model, engine.decode_model]
    return built


def plugin_nodes(graphs) -> list[tuple[onnx.ModelProto, onnx.NodeProto]]:
    nodes = [(model, node) for models in graphs.values() for model in models for node in model.graph.node]
    return [(model, node) for model, node in nodes if node.domain == KVC_DOMAIN and node.op_type in FILES]


def body_of(model: onnx.ModelProto, name: str) -> onnx.FunctionProto:
    return next(body for body in model.functions if body.name == name)


@pytest.mark.parametrize("operator", FILES)
def test_fields_are_the_attributes_of_the_operator(operator):
    fields = [(one.name, one.least, one.most) for one in OPERATORS[operator].attributes]
    assert list(read_table(operator).fields) == fields


@pytest.mark.parametrize("operator", FILES)
def test_inputs_have_the_names_and_the_order_of_the_operator(operator):
    assert [row.name for row in read_table(operator).inputs] == [one.name for one in OPERATORS[operator].inputs]


def test_the_nodes_of_every_policy_carry_these_fields_and_no_others(graphs):
    nodes = plugin_nodes(graphs)
    assert {node.op_type for _, node in nodes} == set(FILES)
    for _, node in nodes:
        attributes = {a.name: a for a in node.attribute if a.name not in PLUGIN_ATTRIBUTES}
        table = read_table(node.op_type)
        assert set(attributes) == {name for name, _, _ in table.fields}
        for name, low, high in table.fields:
            # The parser makes one INT32 of an INT and keeps the low half, whatever stands above it.
            assert attributes[name].type == onnx.AttributeProto.INT
            assert -(2**31) < low <= attributes[name].i <= high < 2**31


def test_the_nodes_name_the_namespace_and_version_of_the_creators(graphs):
    source = (SOURCES / "plugin.h").read_text()
    declared = dict(re.findall(r'constexpr const char\* (kNamespace|kVersion) = "(\w+)";', source))
    for _, node in plugin_nodes(graphs):
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes["plugin_namespace"].decode() == declared["kNamespace"]
        assert attributes["plugin_version"].decode() == declared["kVersion"]


def test_every_node_has_the_tensors_that_its_plugin_expects(graphs):
    """TensorRT refuses a node whose outputs are not as many as the plugin's."""
    for model, node in plugin_nodes(graphs):
        table, body = read_table(node.op_type), body_of(model, node.op_type)
        assert len(node.input) == len(table.inputs)
        assert len(node.output) == len(table.outputs)
        assert list(body.output) == [row.name for row in table.outputs]


def test_tensors_have_the_types_and_ranks_that_onnx_infers(graphs):
    checked = 0
    for models in graphs.values():
        for model in models:
            inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
            values = [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]
            types = {value.name: value.type.tensor_type for value in values}
            for node in model.graph.node:
                if node.domain != KVC_DOMAIN or node.op_type not in FILES:
                    continue
                table = read_table(node.op_type)
                for name, row in zip([*node.input, *node.output], [*table.inputs, *table.outputs], strict=True):
                    expected = ONNX_TYPES.get(row.element, onnx.TensorProto.FLOAT)
                    assert types[name].elem_type == expected, (node.name, row.name)
                    if types[name].HasField("shape"):
                        assert len(types[name].shape.dim) == len(row.shape), (node.name, row.name)
                        checked += 1
    assert checked > 100


def test_state_tensors_have_the_shapes_of_the_tables():
    """The same symbols mean the same sizes in an engine's state and in the plugins."""
    parameters = resolve("rocketkv", skip_layers=1)
    rows = {row.name: row for row in read_table("KvcHybridAttention").inputs}
    sizes = {"G": 2, "D": 16, "C": parameters.capacity, "2D": 32, "P": parameters.num_pages()}
    tensors = [tensor for tensor in state_tensors(LLAMA, parameters, "float16") if tensor.layer == 1]
    assert len(tensors) == 3
    for tensor in tensors:
        row = rows[tensor.name.split(".")[0]]
        assert row.shape[0] == "B"
        assert tuple(sizes[symbol] for symbol in row.shape[1:]) == tensor.shape


@pytest.mark.parametrize("operator", FILES)
def test_what_a_decode_step_writes_in_place_is_the_input_of_that_name(operator):
    table: Table = read_table(operator)
    for row in table.outputs:
        if row.name.endswith("_out"):
            assert row.alias is not None
            written = table.inputs[row.alias]
            assert (f"{written.name}_out", written.element, written.shape) == (row.name, row.element, row.shape)
        else:
            assert row.alias is None


def test_aliases_are_those_of_the_engines_state(graphs):
    """Each output that an engine binds to an input's buffer is aliased to that input by the node's plugin."""
    aliased = 0
    for policy, (_, decode) in graphs.items():
        tensors = state_tensors(LLAMA, resolve(policy, skip_layers=1), "float32")
        inputs_of = {tensor.aliased_output: tensor.name for tensor in tensors}
        for node in decode.graph.node:
            if node.domain != KVC_DOMAIN:
                continue
            for name, row in zip(node.output, read_table(node.op_type).outputs, strict=True):
                expected = inputs_of.pop(name, None)
                assert (None if row.alias is None else node.input[row.alias]) == expected
                aliased += expected is not None
        assert not inputs_of
    assert aliased > 30
