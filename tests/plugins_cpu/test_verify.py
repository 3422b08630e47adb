"""The ladder of `verify` with native operators, also under policies some of whose operators the library lacks."""

from __future__ import annotations

import pytest

from kvc_trt.backends.onnxruntime.native import VARIABLE
from kvc_trt.verify.ladder import verify
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
