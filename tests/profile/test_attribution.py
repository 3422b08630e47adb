"""Time of a function inside a run: nested nodes count once, other functions and other runs not at all."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvc_trt.engine.program import engine_program, twin_program
from kvc_trt.profile.attribution import function_times
from kvc_trt.profile.compaction import time_compaction
from kvc_trt.profile.subject import open_subject


def node(name, start, length):
    return {"cat": "Node", "name": name, "ts": start, "dur": length}


def test_union_of_the_functions_nodes_per_run(tmp_path):
    events = [
        {"cat": "Session", "name": "model_run", "ts": 0, "dur": 1000},
        node("_inlfunc_KvcCompact_TopK_3_kernel_time", 100, 50),
        node("_inlfunc_KvcCompact_token_1_If_91_kernel_time", 200, 300),  # holds the next two
        node("_inlfunc_KvcCompact_token_1_MatMul_44/Fusion/_kernel_time", 210, 100),
        node("_inlfunc_KvcCompact_token_1_Softmax_48_kernel_time", 320, 100),
        node("_inlfunc_KvcCompactor_Add_1_kernel_time", 600, 100),
        node("layers.0/Gemm_23_kernel_time", 700, 200),
        {"cat": "Session", "name": "model_run", "ts": 2000, "dur": 500},
        node("_inlfunc_KvcCompact_TopK_3_kernel_time", 2100, 25),
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(events), encoding="utf-8")
    first, second = function_times(path, "KvcCompact")
    assert (first.run, first.function) == pytest.approx((1e-3, 350e-6))
    assert first.share == pytest.approx(0.35)
    assert (second.run, second.function) == pytest.approx((500e-6, 25e-6))


def test_compaction_of_a_real_prefill(engine):
    found = time_compaction(open_subject("engine", engine_program(engine), 1), 1, 400, repeats=2)
    assert found is not None
    assert 0 < found.function < found.run


def test_a_full_cache_compacts_nothing(engine):
    dense = open_subject("dense", twin_program(engine), 1)
    assert time_compaction(dense, 1, 200, repeats=1) is None
    # The probe looks at the nodes, not at the policy's name: a graph without them has no time in them.
    claims = dataclasses.replace(dense.program, parameters=engine.parameters)
    pretending = dataclasses.replace(dense, program=claims)
    found = time_compaction(pretending, 1, 200, repeats=1)
    assert found is not None
    assert found.function == 0
