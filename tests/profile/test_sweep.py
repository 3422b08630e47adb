"""The model of memory against the memory that is really allocated."""

from __future__ import annotations

import pytest

from kvc_trt.backends.onnxruntime.benchmark import OnnxRuntimeBenchmark
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import engine_program, twin_program
from kvc_trt.profile.profiled_engine import DecodeRun, open_profiled
from kvc_trt.profile.sweep import MeasuredMemory, standing_memory


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_modelled_memory_is_what_is_allocated(engine, rows, dense):
    program = twin_program(engine) if dense else engine_program(engine)
    side = open_profiled("side", program, OnnxRuntimeBenchmark(RunOptions(threads=1), "float32"))
    DecodeRun(side, rows, 200)
    lines = {line.kind: line for line in standing_memory(side, rows)}
    assert set(lines) == {"weights", "cache"} if dense else {"weights", "cache", "page bounds"}
    assert all(abs(line.difference_percent) < 1 for line in lines.values())
    state = sum(line.measured for kind, line in lines.items() if kind != "weights")
    assert state == side.executor.state_bytes()


def test_differences_in_percent():
    assert MeasuredMemory("cache", 100.0, 125.0, "allocated").difference_percent == 25
    assert MeasuredMemory("cache", 0.0, 5.0, "allocated").difference_percent == 0
