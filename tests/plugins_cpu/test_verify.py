"""The ladder of `verify` with native operators, also under policies some of whose operators the library lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from kvc_trt import Engine, build
from kvc_trt.backends.onnxruntime.native import VARIABLE, load
from kvc_trt.graph.rewrites.native import native_in
from kvc_trt.operators.experts import OF_EXPERTS
from kvc_trt.verify.ladder import verify
from tests.oracles.family_models import written
from tests.verify.conftest import make_engine, parameters_for

__all__ = ["make_engine", "parameters_for"]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["rocketkv", "quest", "sparq", "h2o", "streaming-llm", "sliding-window", "duo-attention", "tova"]
)
def test_a_right_engine_passes(policy, library, make_engine, parameters_for, monkeypatch):
    """Within its budget it agrees with its dense twin bit for bit, whichever of its operators are native."""
    engine = make_engine(parameters_for(policy))
    monkeypatch.setenv(VARIABLE, str(library))
    report = verify(engine, steps=3, samples=4)
    assert report.passed, report.failures
    assert next(rung for rung in report.rungs if rung.name == "dense twin").status == "passed"
    assert "native operators" in report.description["kernels"]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_engines_of_gpt_oss_pass_with_native_experts(
    weights: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("gpt-oss-within-its-window", tmp_path / "checkpoint")
    settings: dict[str, Any] = {"weights": weights, "token_budget": 64, "max_input_len": 256, "max_output_len": 32}
    build(str(tmp_path / "checkpoint"), output=tmp_path / "engine", verify=False, **settings)
    monkeypatch.setenv(VARIABLE, str(library))
    with Engine.open(tmp_path / "engine", backend="onnxruntime", threads=1) as engine:
        report = engine.verify(level="quick", steps=3, samples=1)
    assert report.passed, report.failures
    assert "native operators" in report.description["kernels"]
    for name in ("prefill", "decode", "extend"):
        nodes = onnx.load(tmp_path / "engine" / f"{name}.onnx", load_external_data=False).graph.node
        assert set(OF_EXPERTS) & native_in(nodes, load(library).operators).keys()
