"""The Python plugins in the registries of TensorRT's lean runtime and of TensorRT-RTX; graphs that become layers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvc_trt.backends.tensorrt.lowering import PLUGINS, lower
from kvc_trt.operators.registry import KERNEL_OPERATORS
from tests.backends.tensorrt import rtx
from tests.backends.tensorrt.plugin_cases import BY_NAME, fields_with_defaults, graph_fields, malformed, raw
from tests.backends.tensorrt.weightless import weightless_graphs, weights_as_inputs
from tests.graph.small_models import LLAMA, resolve
from tests.plugins_cuda.tensorrt.test_rtx_parser import COMPACT, compact_model

pytestmark = pytest.mark.tensorrt

ROOT = Path(__file__).resolve().parents[3]
LEAN = "tensorrt_lean_bindings"


@pytest.fixture(params=[LEAN, rtx.BINDINGS])
def ask(request, tmp_path):
    """ask(*requests) -> answers of python_plugins_program.py under one module."""
    if request.param == rtx.BINDINGS and (reason := rtx.missing()) is not None:
        pytest.skip(reason)
    if importlib.util.find_spec(request.param) is None:
        pytest.skip("no lean runtime of TensorRT in this Python: pip install '.[tensorrt-lean]'")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("TensorRT is not built for AddressSanitizer")

    def ask(*requests) -> dict:
        file = tmp_path / "request.json"
        file.write_text(json.dumps(requests))
        command = [sys.executable, "-m", "tests.backends.tensorrt.python_plugins_program", request.param, file]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stderr[-4000:]}"
        return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}

    return ask


def request_of(operator: str, fields) -> dict:
    return {"operator": operator, "fields": [[field.name, field.type, field.values] for field in fields]}


def test_python_plugins_register_once_and_leave_nothing_behind(ask):
    answer = ask()
    expected = {
        operator.name: ["1", [[one.name, "INT32"] for one in operator.call_attributes]] for operator in KERNEL_OPERATORS
    }
    assert answer["creators"] == expected
    first = KERNEL_OPERATORS[0].name
    assert answer["again"] == f"plugin {first}: TensorRT's registry has one already, expected none"
    assert answer["kept"] == [operator.name for operator in KERNEL_OPERATORS]
    assert answer["left"] == []


def test_fields_of_the_graphs_make_plugins_in_both_phases(ask):
    found = graph_fields()
    answer = ask(*(request_of(name, raw(dict(fields))) for name, fields in found))
    for (operator, fields), made in zip(found, answer["created"], strict=True):
        expected = {name: [value] for name, value in fields_with_defaults(operator, dict(fields)).items()}
        assert made == {"created": True, "capable": True, "fields": expected}


def test_a_malformed_field_makes_no_plugin_and_gives_the_reason(ask):
    cases = malformed()
    answer = ask(*(request_of(case.operator, case.fields) for case in cases))
    for case, made in zip(cases, answer["created"], strict=True):
        assert made == {"created": False, "reason": case.line}
        assert case.line in answer["stderr"]
    assert {case.operator for case in cases} == set(BY_NAME)


def test_an_empty_collection_makes_none_of_an_operator_with_attributes(ask):
    operators = [operator for operator in KERNEL_OPERATORS if operator.attributes]
    answer = ask(*(request_of(operator.name, ()) for operator in operators))
    for operator, made in zip(operators, answer["created"], strict=True):
        assert not made["created"]
        assert made["reason"] == f"kvc plugin: {operator.name}: field {operator.attributes[0].name}: missing"


# --- in NVIDIA's parser and builder ---


def test_a_node_becomes_a_layer_and_a_plan(ask_parser):
    names = {"fp32": "FLOAT", "fp16": "HALF"}
    answers = ask_parser(*map(compact_model, names), plan=True)
    for name, answer in zip(names.values(), answers, strict=True):
        assert answer["parsed"], answer["errors"]
        assert (answer["plugins"], answer["kinds"]) == ({"KvcCompact": 1}, {"PLUGIN_V3": 1})
        cache, pages = [[-1, 2, 58, 16], name], 15 if name == "FLOAT" else 16
        assert answer["outputs"] == {
            "k_cache": cache, "v_cache": cache, "bounds": [[-1, 2, 32, pages], name], "cache_lengths": [[-1], "INT64"],
            "indices": [[-1, 2, 58], "INT32"],
        }  # fmt: skip
        assert answer["plan_bytes"] > 0, answer["log"]


def test_a_node_with_bad_attributes_does_not_parse(ask_parser):
    wrong = {
        "field pool_kernel: expected an odd number, found 8": {**COMPACT, "pool_kernel": 8},
        "field page_size: expected 1..2147483647, found 0": {**COMPACT, "page_size": 0},
        "field capacity: missing": {name: COMPACT[name] for name in COMPACT if name != "capacity"},
    }
    answers = ask_parser(*(compact_model("fp16", attributes) for attributes in wrong.values()))
    for reason, answer in zip(wrong, answers, strict=True):
        assert not answer["parsed"]
        assert any("Could not create the plugin" in error for error in answer["errors"])
        assert f"kvc plugin: KvcCompact: {reason}" in answer["stderr"]


def test_a_head_size_that_no_kernel_serves_fails_the_build(ask_parser):
    model = compact_model("fp16")
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value"):
                dim.dim_value = {16: 20, 32: 40}.get(dim.dim_value, dim.dim_value)
    (answer,) = ask_parser(model, plan=True)
    assert answer["parsed"]
    assert answer["plan_bytes"] == 0
    assert "kvc plugin: KvcCompact: " in answer["stderr"]
    assert "head_size is 20" in answer["stderr"]


def test_a_profile_that_is_refused_fails_the_build_and_not_the_process(ask_parser):
    """With several plugins, the builder and Python both freed them, and the process aborted without an answer."""
    parameters = resolve("rocketkv", token_budget=4096, max_input_len=8000, window=2000)
    graphs = weightless_graphs(LLAMA, parameters, "bf16")
    prefill = weights_as_inputs(lower(graphs[0], tensorrt=(11, 4), plugins=PLUGINS))
    (answer,) = ask_parser(prefill, plan=True)
    assert answer["parsed"]
    assert answer["plan_bytes"] == 0
    assert "window is 2000; expected 1..1024" in answer["stderr"]


def test_sizes_that_contradict_each_other_do_not_parse(ask_parser):
    model = compact_model("fp16")
    (keys,) = (value for value in model.graph.input if value.name == "k")
    keys.type.tensor_type.shape.dim[3].dim_value = 24
    (answer,) = ask_parser(model)
    assert not answer["parsed"]
    assert "kvc plugin: KvcCompact: k: expected head size = 16, found 24" in answer["stderr"]
