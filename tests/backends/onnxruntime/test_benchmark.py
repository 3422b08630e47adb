"""Times read from a profile of ONNX Runtime: the time of a function inside a run; nested nodes count once."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvc_trt.backends.onnxruntime.backend import BACKEND
from kvc_trt.backends.onnxruntime.benchmark import OnnxRuntimeBenchmark, function_times, prefill_memory
from kvc_trt.backends.onnxruntime.native import VARIABLE
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import twin_program
from kvc_trt.profile.profiled_engine import random_prompts


def node(name, start, length, operator="MatMul"):
    return {"cat": "Node", "name": name, "ts": start, "dur": length, "args": {"op_name": operator}}


def test_time_of_a_function_is_the_union_of_its_nodes_per_run(tmp_path):
    events = [
        {"cat": "Session", "name": "model_run", "ts": 0, "dur": 1000},
        node("_inlfunc_KvcCompact_TopK_3_kernel_time", 100, 50),
        node("_inlfunc_KvcCompact_token_1_If_91_kernel_time", 200, 300),  # holds the next two
        node("_inlfunc_KvcCompact_token_1_MatMul_44/Fusion/_kernel_time", 210, 100),
        node("_inlfunc_KvcCompact_token_1_Softmax_48_kernel_time", 320, 100),
        node("_inlfunc_KvcCompactor_Add_1_kernel_time", 600, 100),
        node("layers.0/Gemm_23_kernel_time", 700, 200, "Gemm"),
        {"cat": "Session", "name": "model_run", "ts": 2000, "dur": 500},
        node("layers.0/compact_kernel_time", 2100, 25, "KvcCompact"),  # native: not inlined
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(events), encoding="utf-8")
    first, second = function_times(path, "KvcCompact")
    assert (first.run, first.part) == pytest.approx((1e-3, 350e-6))
    assert first.share == pytest.approx(0.35)
    assert (second.run, second.part) == pytest.approx((500e-6, 25e-6))


@pytest.fixture
def program(make_program):
    return make_program("rocketkv", max_input_len=512, max_output_len=32, token_budget=64)


def compaction(program, tokens, repeats):
    return OnnxRuntimeBenchmark(RunOptions(threads=1), "float32").compaction(
        program, random_prompts(1, tokens, program.model.vocab_size), repeats
    )


def test_compaction_takes_part_of_a_prefill(program):
    found = compaction(program, 400, 2)
    assert found is not None
    assert 0 < found.part < found.run


@pytest.mark.parametrize("policy", ["keydiff", "expected-attention", "h2o"])
def test_time_of_every_compaction_operator_is_counted(make_program, policy):
    found = compaction(make_program(policy, max_input_len=512, max_output_len=32, token_budget=64), 400, 1)
    assert found is not None
    assert 0 < found.part < found.run


def test_compaction_by_the_native_operator_counts(program, library, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(library))
    found = compaction(program, 400, 1)
    assert found is not None
    assert 0 < found.part < found.run


def test_a_full_cache_spends_no_time_on_compaction(program):
    dense = twin_program(program)
    assert compaction(dense, 200, 1) is None
    # The profile tells by the nodes, not by the policy's name: a graph without them has no time in them.
    pretending = dataclasses.replace(dense, parameters=program.parameters)
    found = compaction(pretending, 200, 1)
    assert found is not None
    assert found.part == 0


def test_prefill_memory_is_linear_in_the_prompt(program):
    state = prefill_memory(program, 1, 0)
    one, two = (prefill_memory(program, 1, tokens) - state for tokens in (4096, 8192))
    assert two == 2 * one > 0


@pytest.mark.parametrize(("precision", "expected"), [("fp32", "native operators"), ("fp16", "bodies")])
def test_the_record_says_what_computes_the_engines_operators(make_program, library, monkeypatch, precision, expected):
    """Native operators have caches of float32 alone."""
    monkeypatch.setenv(VARIABLE, str(library))
    program = make_program("full", precision)
    engine = dataclasses.replace(program, model=dataclasses.replace(program.model, dtype=program.dtype))
    benchmark = BACKEND.benchmark(engine, RunOptions(threads=1))
    assert benchmark.describe()["operators"].startswith(expected)
