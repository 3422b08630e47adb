"""The whole ladder of `verify` through the kernels, emulated: right ones pass every rung, a wrong tie does not pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.torch.harness import TorchHarness
from kvc_trt.backends.torch.model.weights import TorchWeights
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.verify.ladder import verify
from tests.backends.torch.without_kernels import without_kernels
from tests.every_policy import parameters_of
from tests.kernels.double import compile_double
from tests.plugins_cuda.build import broken_emulation
from tests.verify.conftest import MODEL, make_engine, parameters_for

__all__ = ["make_engine", "parameters_for"]

EVERYTHING = {"ops", "logits", "tokens", "retrieval", "dense twin", "activity"}
WRONG_TIES = (
    ("kernels/pool_select.cuh", "(int32_t i) { return keys[i]; }", "(int32_t i) { return keys[i] + i % 2; }"),
    ("kernels/page_shares.cuh", "keys[j] = order_key(shares[j]);", "keys[j] = order_key(shares[j]) + j % 2;"),
)  # fmt: skip
"""Mistakes in kernels, by file: of two equal scores the one at an odd place wins; scores change by one bit at most."""


def passed_rungs(report):
    return {rung.name for rung in report.rungs if rung.status == "passed"}


@pytest.mark.slow
def test_retrieval_tiny_passes_every_rung_through_the_emulated_kernels(engine, emulation):
    """Smaller than the quick level's own sizes (8 of 32 steps, 4 of 32 questions); the next test has more."""
    report = verify(engine, RunOptions("torch"), kernels=emulation.path, steps=8, samples=4)
    assert report.passed, report.failures
    assert passed_rungs(report) == EVERYTHING
    assert report.description["backend"].startswith("torch ")
    assert report.description["kernels"].startswith(f"{emulation.path} (emulation, sha256 ")
    assert f"kernels: {emulation.path} (emulation" in report.as_text()
    assert report.near_ties.lists_compared > 200


@pytest.mark.exhaustive
def test_retrieval_tiny_passes_the_quick_level_through_the_emulated_kernels(engine, emulation):
    """Takes as many steps as a user's check, and a quarter of its 32 questions per placement."""
    report = verify(engine, RunOptions("torch"), kernels=emulation.path, samples=8)
    assert report.passed, report.failures
    assert passed_rungs(report) == EVERYTHING


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "snapkv++", "hybrid"])
def test_the_other_policies_pass_through_the_emulated_kernels(policy, emulation, make_engine, parameters_for):
    report = verify(make_engine(parameters_for(policy)), RunOptions("torch"), kernels=emulation.path, steps=3)
    assert report.passed, report.failures
    assert passed_rungs(report) >= {"ops", "logits", "tokens"}


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("policy", without_kernels())
def test_policies_without_kernels_pass_by_their_nodes(policy, make_engine):
    """The dense twin of steps without a kernel runs the same bodies, so that it can be compared bit for bit."""
    engine = make_engine(parameters_of(policy, MODEL, max_output_len=40), turns=True)
    report = verify(engine, RunOptions("torch"), steps=3)
    assert report.passed, report.failures
    assert passed_rungs(report) >= {"ops", "logits", "tokens", "dense twin", "activity"}
    assert f"{policy}: " in report.description["without kernels"]
    assert report.description["without kernels"] in report.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp16", "bf16", "int8"])
def test_fp16_bf16_and_int8_weights_pass_through_the_emulated_kernels(weights, emulation, make_engine, parameters_for):
    made = make_engine(parameters_for(), weights=weights)
    report = verify(made, RunOptions("torch"), kernels=emulation.path, steps=3)
    assert report.passed, report.failures
    assert passed_rungs(report) >= {"ops", "logits", "tokens", "dense twin", "activity"}


@pytest.mark.slow
def test_16_bit_arithmetic_around_the_kernels_passes(emulation, make_engine, parameters_for, monkeypatch):
    """Weights and activations have the caches' type, as on a GPU; here by PyTorch's CPU kernels for bfloat16."""
    engine = make_engine(parameters_for(), weights="bf16")
    source = EngineWeights(engine.weight_file)
    weights = TorchWeights.read(engine.model, source, torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(TorchHarness, "_weights", weights)
    report = verify(engine, RunOptions("torch"), kernels=emulation.path, steps=8)
    assert report.passed, report.failures
    assert passed_rungs(report) >= {"ops", "logits", "tokens", "dense twin", "activity"}


@pytest.mark.slow
def test_a_wrong_tie_in_the_kernels_fails(engine, tmp_path):
    """Compiled from the repository's kernels with one line changed in each selection."""
    broken = broken_emulation(tmp_path, ("compact.cu", "hybrid_attention.cu"), *WRONG_TIES)
    report = verify(engine, RunOptions("torch"), level="ops", kernels=broken, steps=8)
    assert not report.passed
    failed = {check.name for rung in report.rungs for check in rung.checks if check.passed is False}
    assert {"KvcCompact indices", "KvcHybridAttention indices"} <= failed
    assert any("lower index wins" in failure or "higher index" in failure for failure in report.failures)


def test_a_library_that_computes_nothing_fails_in_every_rung(engine, tmp_path):
    """Whatever it leaves in its outputs, there is a report."""
    report = verify(engine, RunOptions("torch"), kernels=compile_double(tmp_path), steps=2, samples=1)
    assert {rung.name for rung in report.rungs if rung.status == "failed"} >= {"ops", "logits", "tokens"}
    json.dumps(report.to_json(), allow_nan=False)
    assert "FAILED" in report.as_text()


def test_without_a_library_the_report_says_so(engine):
    report = verify(engine, RunOptions("torch"), level="ops", steps=2)
    assert report.passed, report.failures
    assert report.description["kernels"] == "reference ops"
    assert "kernels: reference ops" in report.as_text()


def test_onnxruntime_stays_the_default(engine):
    report = verify(engine, level="ops", steps=2)
    assert report.description["backend"].startswith("onnxruntime ")
    assert "kernels" not in report.description


@pytest.mark.parametrize(("backend", "kernels"), [("onnxruntime", "lib.so"), ("tensorflow", None)])
def test_kernels_of_another_backend_and_unknown_backends_are_refused(backend, kernels, engine):
    with pytest.raises(InputError, match=r"--kernels lib|unknown backend 'tensorflow'"):
        verify(engine, RunOptions(backend), kernels=kernels)


def test_the_command_line_takes_a_backend_and_a_library(engine, emulation, capsys):
    arguments = ["verify", str(engine.path), "--level", "ops", "--steps", "2", "--json"]
    assert run([*arguments, "--backend", "torch", "--kernels", str(emulation.path)]) == 0
    assert json.loads(capsys.readouterr().out)["description"]["kernels"].startswith(str(emulation.path))


def test_the_command_line_refuses_impossible_kernels(engine, tmp_path, capsys):
    text = tmp_path / "text.so"
    text.write_text("no library")
    arguments = ["verify", str(engine.path), "--level", "ops"]
    assert run([*arguments, "--kernels", str(text)]) == 2
    assert "--backend onnxruntime does not call it" in capsys.readouterr().err
    assert run([*arguments, "--backend", "torch", "--kernels", str(text)]) == 3
    assert "text.so cannot be loaded" in capsys.readouterr().err
    assert run([*arguments, "--backend", "torch", "--kernels", str(Path("/none.so"))]) == 2
