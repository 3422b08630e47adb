"""The model of memory against the memory that is really allocated."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

from kvc_trt.backends.onnxruntime.benchmark import OnnxRuntimeBenchmark
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.torch.benchmark import TorchBenchmark
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.program import engine_program, twin_program
from kvc_trt.files.held import HeldFile
from kvc_trt.models.config import Attention, Linear, ModelDescription
from kvc_trt.profile.decode_memory import decode_peak
from kvc_trt.profile.profiled_engine import DecodeRun, open_profiled
from kvc_trt.profile.sweep import MeasuredMemory, standing_memory
from kvc_trt.profile.traffic import cache_bytes, linear_bytes
from tests.small_model import SMALL

PART = Linear(key_heads=2, value_heads=4, key_size=16, value_size=8, kernel=4)
LINEAR = replace(SMALL, description=ModelDescription(attention=(Attention(linear=PART), Attention(gated=True))))


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


@pytest.mark.parametrize(
    ("policy", "model", "kinds"),
    [
        ("rocketkv", LINEAR, {"cache", "page bounds", "positions", "linear state"}),
        ("full", LINEAR, {"cache", "linear state"}),
        ("h2o", SMALL, {"cache", "positions", "other state"}),
        ("sparq", SMALL, {"cache", "other state"}),
    ],
)
def test_state_is_named_by_its_kind(policy, model, kinds, make_program):
    program = make_program(policy, model=model, turns=True)
    side = open_profiled("side", program, OnnxRuntimeBenchmark(RunOptions(threads=1), "float32"))
    DecodeRun(side, 2, 90)
    lines = {line.kind: line for line in standing_memory(side, 2)}
    assert set(lines) == {"weights"} | kinds
    assert all(line.modelled == line.measured > 0 for kind, line in lines.items() if kind != "weights")
    if "linear state" in kinds:
        assert lines["linear state"].measured == 2 * linear_bytes(model, 4)


ROWS = 128
"""Enough for caches of 34 MiB, which stand out of what an allocator keeps."""


def _caches_and_peaks(engine: EngineDirectory, executor: str) -> tuple[int, list[int]]:
    """Bytes of the caches, and the peaks of two measurements, of which the second finds an executor with caches."""
    program, options = twin_program(engine), RunOptions(threads=1)
    torch = TorchBenchmark(engine, options) if executor == "torch" else None
    side = open_profiled("side", program, torch or OnnxRuntimeBenchmark(options, "float32"))
    peaks = [decode_peak(side, ROWS, 512) for _ in range(2)]
    assert "without mapped files" in peaks[0].how
    return ROWS * cache_bytes(program.model, program.parameters, 4).total, [peak.bytes for peak in peaks]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["onnxruntime", "torch"])
def test_the_peak_of_decode_is_caches_and_what_a_step_works_in(engine, executor):
    """In a process of its own: one that has freed memory takes caches from it, and grows by less than they are."""
    unopened = replace(engine, held={name: HeldFile(file.path) for name, file in engine.held.items()})
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        caches, peaks = alone.submit(_caches_and_peaks, unopened, executor).result(timeout=600)
    assert caches > 32 << 20
    for peak in peaks:
        assert caches - (4 << 20) < peak < 2 * caches  # steps of every row attend to all of a cache, and copy none


def test_an_executor_that_holds_caches_is_measured_from_none(engine):
    side = open_profiled("side", twin_program(engine), OnnxRuntimeBenchmark(RunOptions(threads=1), "float32"))
    held = DecodeRun(side, ROWS, 512)
    assert decode_peak(side, 1, 512).bytes < 16 << 20
    assert held.step_seconds() > 0


def test_memory_differences_are_in_percent():
    assert MeasuredMemory("cache", 100.0, 125.0, "allocated").difference_percent == 25
    assert MeasuredMemory("cache", 0.0, 5.0, "allocated").difference_percent == 0
