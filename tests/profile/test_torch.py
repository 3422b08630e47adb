"""Profiles of engines for PyTorch: on a CPU they run, in the same form as any other, and state their limits."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import kvc_trt.backends.onnxruntime.benchmark
import kvc_trt.backends.torch.benchmark
from kvc_trt.backends.benchmark import CopyBandwidth
from kvc_trt.backends.opening import benchmark_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.torch.benchmark import TimedDecoder
from kvc_trt.cli.text.profile import profile_text
from kvc_trt.engine.program import engine_program, twin_program
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.machine import place
from kvc_trt.profile import run as profile_run
from kvc_trt.profile.pages.files import csv_bytes, png_bytes
from kvc_trt.profile.profiled_engine import DecodeRun, open_profiled, random_prompts
from kvc_trt.profile.request import ProfileRequest
from kvc_trt.profile.sweep import standing_memory
from kvc_trt.progress import NullProgress
from kvc_trt.runtime.executor import GreedyExecutor

REQUEST = ProfileRequest((96, 512), (1, 2), 3, 5.0, prefills=1, prefill_seconds=60.0, options=RunOptions(threads=1))


@pytest.fixture(autouse=True)
def _no_library(monkeypatch):
    """The reference operators, whatever this machine has; a copy bandwidth without copying gigabytes."""
    threads = torch.get_num_threads()
    monkeypatch.delenv("KVC_TRT_KERNELS", raising=False)
    found = CopyBandwidth(10e9, 1e8, 3, 1 << 30, 1, 1 << 20)
    for module in (kvc_trt.backends.onnxruntime.benchmark, kvc_trt.backends.torch.benchmark):
        monkeypatch.setattr(module, "measure_copy_bandwidth", lambda threads: found)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def torch_engine(engine):
    """The engine as if it had been built for PyTorch: weights and state are the same."""
    config = dataclasses.replace(engine.config, build=engine.build.model_copy(update={"backend": "torch"}))
    return dataclasses.replace(engine, config=config)


@pytest.fixture
def result(torch_engine):
    return profile_run.profile_engine(torch_engine, REQUEST, NullProgress())


@pytest.mark.slow
def test_a_profile_has_the_form_of_any_other(result, engine):
    other = profile_run.profile_engine(engine, REQUEST, NullProgress())
    assert set(result) == set(other)
    assert [list(row) for row in result["rows"]] == [list(row) for row in other["rows"]]
    assert result["engine"]["backend"] == "torch"
    counted = "cache_bytes_read_per_step_modelled"
    assert [row[counted] for row in result["rows"]] == [row[counted] for row in other["rows"]]
    for row in result["rows"]:
        assert row["median_itl_ms"] > 0
        assert row["percent_of_floor"] == pytest.approx(100 * row["floor_ms"] / row["median_itl_ms"])
        assert row["median_ttft_ms"] == pytest.approx(row["prefill_ms"] + row["compaction_ms"])
    assert {row["compaction_ms"] > 0 for row in result["rows"] if row["side"] == "engine"} == {True}
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert csv_bytes(result["rows"])
    assert png_bytes(result)[:4] == b"\x89PNG"


def test_a_cpu_is_not_taken_for_a_gpu(result):
    machine = result["machine"]
    assert (machine["torch_device"], machine["kernels"], machine["threads"]) == ("cpu", "reference operators", 1)
    assert "gpu" not in machine
    assert "no figure here is one of a GPU" in result["findings"][0]
    assert "in float32 around the reference operators, not a GPU" in profile_text(result)


def test_a_gpu_is_named_in_place_of_the_processor():
    assert place({"gpu": "NVIDIA H200", "device": "a processor"}) == "NVIDIA H200, host a processor"


def test_weights_lie_in_memory_once_for_both_sides_and_are_what_is_counted(torch_engine):
    program, place = engine_program(torch_engine), benchmark_for(torch_engine, RunOptions(threads=1))
    engine = open_profiled("engine", program, place)
    dense = open_profiled("dense", twin_program(program), place)
    assert engine.executor.weights is dense.executor.weights
    assert isinstance(engine.executor, GreedyExecutor)
    for subject, kinds in ((engine, {"weights", "cache", "page bounds"}), (dense, {"weights", "cache"})):
        DecodeRun(subject, 2, 200)
        lines = {line.kind: line for line in standing_memory(subject, 2)}
        assert set(lines) == kinds
        assert all(abs(line.difference_percent) < 1 for line in lines.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_floor_counts_weights_as_they_are_read(dtype, torch_engine):
    """A file in bfloat16 is read in float32 on a CPU."""
    found = benchmark_for(torch_engine, RunOptions(threads=1))
    found._weights.embedding = found._weights.embedding.to(dtype)
    assert found.weight_format(engine_program(torch_engine)) == {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def test_nothing_is_compacted_in_a_dense_engine(torch_engine):
    place = benchmark_for(torch_engine, RunOptions(threads=1))
    dense = open_profiled("dense", twin_program(torch_engine), place)
    assert place.compaction(dense.program, random_prompts(1, 64, 50), 1) is None


def test_a_prefill_that_does_not_fit_is_left_out_and_said(torch_engine, monkeypatch):
    def refuse(*_):
        raise UnsupportedEnvironment("prefill of 1 x 96 tokens needs 99.0 GiB")

    monkeypatch.setattr("kvc_trt.backends.torch.executor.TorchExecutor._require_prefill", refuse)
    monkeypatch.setattr("kvc_trt.profile.sweep._Sweeper._expected_prefill", lambda *_: 0.0)
    request = dataclasses.replace(REQUEST, contexts=(96,), batches=(1,))
    found = profile_run.profile_engine(torch_engine, request, NullProgress())
    assert {row["median_ttft_ms"] for row in found["rows"]} == {None}
    assert any("not measured: prefill of 1 x 96 tokens needs 99.0 GiB" in line for line in found["left_out"])


def test_every_compaction_is_timed(torch_engine):
    place = benchmark_for(torch_engine, RunOptions(threads=1))
    subject = open_profiled("engine", engine_program(torch_engine), place)
    times = place.compaction(subject.program, random_prompts(2, 300, 50), 2)
    assert 0 < times.part < times.run
    assert not isinstance(subject.executor.decoder, TimedDecoder), "what is measured otherwise times nothing"
