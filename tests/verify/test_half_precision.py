"""The shipped model in fp16, whose rounding swaps channels and pages: an honest engine's choices are explained."""

from __future__ import annotations

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.verify.ladder import verify


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "budget"),
    [("rocketkv", 64), ("rocketkv-mt", 256), ("hybrid", 256), ("sparq", 128), ("expected-attention-hybrid", 64),
     *(pytest.param(name, 128, marks=pytest.mark.exhaustive) for name in ("rocketkv", "expected-attention-hybrid"))],
)  # fmt: skip
def test_an_honest_fp16_engine_passes(policy, budget, tmp_path, capsys):
    path = tmp_path / "engine"
    settings = ["--model", "retrieval-tiny", "--weights", "fp16", "--policy", policy, "--token-budget", str(budget)]
    assert run(["build", *settings, "--no-verify", "-o", str(path)]) == 0
    report = verify(open_engine(path), level="logits")
    assert report.passed, report.failures
    (logits,) = (rung for rung in report.rungs if rung.name == "logits")
    (choices,) = (check for check in logits.checks if check.name == "choices unlike the reference's own run")
    assert "near-ties" in choices.detail
    assert any(check.name == "inputs of choices" for check in logits.checks)
