"""NVIDIA's own parser and builder on the graphs of an engine: every operator becomes one of our plugins.

The wheels of TensorRT-RTX build plans on a CPU; nothing runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from kvc_trt.graph import IR_VERSION
from kvc_trt.graph.state import state_tensors
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators import KVC_DOMAIN, OPSET
from kvc_trt.operators.dimensions import stored_pages
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.registry import KERNEL_OPERATORS, OPERATORS
from kvc_trt.operators.schema import CACHE, INT8, INT32, INT64, PLUGIN_ATTRIBUTES
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import LLAMA, resolve

pytestmark = pytest.mark.tensorrt

PLUGINS = {operator.name for operator in KERNEL_OPERATORS}
PRECISIONS = {"fp32": ("float32", "FLOAT"), "fp16": ("float16", "HALF"), "bf16": ("bfloat16", "BF16")}
COMPACT = {"prompt_budget": 50, "capacity": 58, "pool_kernel": 7, "page_size": 4, "fp8_bounds": 0}


@pytest.fixture
def parse(plugins, tmp_path):
    """parse(model or its path, plugins=True, aliases=True) -> answers of rtx_parser.py."""
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("no TensorRT-RTX in this Python: pip install '.[tensorrt-rtx]'")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("TensorRT-RTX is not built for AddressSanitizer")

    def run(model, *, with_plugins=True, aliases=True):
        path = model
        if isinstance(model, onnx.ModelProto):
            path = tmp_path / "model.onnx"
            onnx.save(model, path)
        program = Path(__file__).with_name("rtx_parser.py")
        library = str(plugins) if with_plugins else ""
        command = [sys.executable, program, tmp_path, library, path, "aliases" if aliases else "no"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stderr[-4000:]}"
        return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}

    return run


def saved_decode(
    directory: Path, policy: str, precision: str, *, fp8_bounds: bool = False
) -> tuple[Path, onnx.ModelProto]:
    """Return a decode graph beside its weights. bfloat16 has no executor on a CPU, so the graph is built on its own."""
    from kvc_trt.graph.build import build_decode
    from kvc_trt.graph.weights import GraphWeights, write_weights
    from kvc_trt.models.random_weights import RandomWeights

    parameters = replace(resolve(policy, skip_layers=1), fp8_bounds=fp8_bounds)
    weights = directory / "weights.safetensors"
    write_weights(LLAMA, RandomWeights(LLAMA, 0), weights, weights=precision, length=parameters.max_sequence_len)
    model = build_decode(LLAMA, parameters, weights=GraphWeights(weights))
    onnx.save(model, directory / "decode.onnx")
    return directory / "decode.onnx", model


def compact_model(precision: str, attributes: dict[str, int] = COMPACT) -> onnx.ModelProto:
    """One KvcCompact; its body comes along, as in every graph of ours."""
    dtype, _ = PRECISIONS[precision]
    element = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[dtype]
    types = {CACHE: element, INT8: TensorProto.INT8, INT64: TensorProto.INT64, INT32: TensorProto.INT32}
    table, emit = OPERATORS["KvcCompact"], Emitter()
    names = [row.name for row in table.outputs]
    emit.call(
        "KvcCompact", *(row.name for row in table.inputs), outputs=names, domain=KVC_DOMAIN, **attributes,
        **PLUGIN_ATTRIBUTES,
    )  # fmt: skip
    fp8_bounds = attributes["fp8_bounds"]
    pages = stored_pages(58, 4, numpy_dtype(dtype).itemsize, fp8_bounds)
    sizes = {"B": "batch", "S": "sequence", "H": 4, "G": 2, "W": 8, "D": 16, "C": 58, "2D": 32, "P": pages}
    inputs, outputs = (
        [
            helper.make_tensor_value_info(
                row.name, types[table.element_of(row, attributes)], [sizes[s] for s in row.shape]
            )
            for row in rows
        ]
        for rows in (table.inputs, table.outputs)
    )
    layout = Layout(HeadShape(4, 2, 16), dtype=dtype, fp8_bounds=bool(fp8_bounds), numbers={"pool_kernel": 7})
    body = table.body(layout)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(KVC_DOMAIN, 1)]
    graph = helper.make_graph(emit.nodes, "one", inputs, outputs)
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, functions=[body])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("policy", "fp8_bounds"),
    [("rocketkv", False), ("rocketkv", True), ("full", False)],
    ids=["rocketkv", "fp8", "full"],
)
def test_every_operator_of_a_decode_graph_becomes_a_plugin_and_a_plan_is_built(
    parse, tmp_path, policy, fp8_bounds, precision
):
    path, model = saved_decode(tmp_path, policy, precision, fp8_bounds=fp8_bounds)
    answer = parse(path)
    assert answer["parsed"], answer["errors"]
    nodes = {node.name: node.op_type for node in model.graph.node if node.op_type in PLUGINS}
    assert Counter(nodes[name] for name, _ in answer["plugins"]) == Counter(nodes.values())
    assert len(answer["plugins"]) == LLAMA.num_hidden_layers
    dtype, name = PRECISIONS[precision]
    for tensor in state_tensors(LLAMA, replace(resolve(policy, skip_layers=1), fp8_bounds=fp8_bounds), dtype):
        expected = "INT8" if tensor.dtype == "int8" else name
        assert answer["outputs"][tensor.aliased_output] == [[-1, *tensor.shape], expected]
    assert answer["plan_bytes"] > 0, answer["errors"]


@pytest.mark.parametrize("fp8_bounds", [0, 1])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_compaction_becomes_a_plugin_with_static_cache_shapes(parse, precision, fp8_bounds):
    answer = parse(compact_model(precision, {**COMPACT, "fp8_bounds": fp8_bounds}))
    assert answer["parsed"], answer["errors"]
    name = PRECISIONS[precision][1]
    pages = 15 if precision == "fp32" and not fp8_bounds else 16
    cache, bounds = [[-1, 2, 58, 16], name], [[-1, 2, 32, pages], "INT8" if fp8_bounds else name]
    (plugin,) = answer["plugins"]
    assert plugin[1] == [cache, cache, bounds, [[-1], "INT64"], [[-1, 2, 58], "INT32"]]
    assert answer["plan_bytes"] > 0, answer["errors"]


def test_without_the_library_a_graph_falls_back_to_its_body_without_a_word(parse, tmp_path):
    """This is why an engine's plugin layers have to be counted."""
    path, _ = saved_decode(tmp_path, "full", "fp16")
    answer = parse(path, with_plugins=False)
    assert (answer["parsed"], answer["plugins"], answer["errors"]) == (True, [], [])
    assert answer["plan_bytes"] > 0


def test_aliases_need_their_preview_feature(parse, tmp_path):
    answer = parse(saved_decode(tmp_path, "rocketkv", "fp16")[0], aliases=False)
    assert answer["plan_bytes"] == 0
    assert any("ALIASED_PLUGIN_IO_10_03 not enabled" in error for error in answer["errors"])


@pytest.mark.parametrize(
    "attributes",
    [
        {**COMPACT, "pool_kernel": 8},
        {**COMPACT, "page_size": 0},
        {**COMPACT, "prompt_budget": 59},
        {name: value for name, value in COMPACT.items() if name != "capacity"},
    ],
    ids=["even kernel", "page size 0", "budget over capacity", "no capacity"],
)
def test_a_node_with_bad_attributes_does_not_parse(parse, attributes):
    answer = parse(compact_model("fp16", attributes))
    assert not answer["parsed"]
    assert any("Could not create the plugin" in error for error in answer["errors"])
    assert "kvc plugin: KvcCompact: field " in answer["stderr"]


def test_a_head_size_that_no_kernel_serves_fails_the_build(parse):
    model = compact_model("fp16")
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value"):
                dim.dim_value = {16: 20, 32: 40}.get(dim.dim_value, dim.dim_value)
    answer = parse(model)
    assert answer["parsed"]
    assert answer["plan_bytes"] == 0
    assert "kvc plugin: KvcCompact: head_size is 20" in answer["stderr"]
