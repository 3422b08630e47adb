"""Experts with quantised weights: verification goes on from the engine's choice at near-ties, and finds mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvc_trt import Engine, build
from kvc_trt.graph.layers import Layers
from kvc_trt.models.weights import ROUTER
from kvc_trt.verify.report import Report
from kvc_trt.verify.routes import Routes
from tests.oracles.family_models import MODELS, our_config, written

WITH_EXPERTS = [
    name for name in MODELS if (config := our_config(name)).description.experts is not None and not config.linear_layers
]
EXPERTS = "experts unlike the reference's own run"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def asked(name: str) -> Path:
        path = tmp_path_factory.mktemp(name) / "checkpoint"
        written(name, path)
        return path

    return asked


def verified(checkpoint: Path, engine: Path, weights: str, level: str = "logits", *, drafts: bool = False) -> Report:
    name = checkpoint.parent.name.rstrip("0123456789")
    windows = our_config(name).windows(288)
    settings: dict[str, Any] = {"policy": "rocketkv", "token_budget": 64}
    if windows is not None:
        settings = {"policy": "full"} if all(windows) else settings
    elif drafts:
        settings["draft_tokens"] = 2
    lengths: dict[str, Any] = {"max_input_len": 256, "max_output_len": 32}
    build(str(checkpoint), output=engine, weights=weights, verify=False, **settings, **lengths)
    with Engine.open(engine, threads=1) as opened:
        return opened.verify(level=level, steps=4, samples=2)


def measured(report: Report) -> dict[str, Any]:
    return {check.name: check for rung in report.rungs for check in rung.checks}


@pytest.mark.as_users
@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_engines_with_experts_pass(name: str, weights: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Where rounding decides between two experts, results would differ by more than the bars of logits."""
    report = verified(checkpoint(name), tmp_path / "engine", weights, level="quick", drafts=True)
    assert report.passed, report.failures
    names = {check for check in measured(report) if check.endswith(EXPERTS)}
    drafted = our_config(name).windows(288) is None
    assert names == {EXPERTS, f"turns: {EXPERTS}", *([f"drafts: {EXPERTS}"] if drafted else [])}


@pytest.mark.as_users
@pytest.mark.slow
def test_near_ties_of_experts_alone_would_fail_the_bars(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Routes, "of", classmethod(lambda *_given: None))
        alone = verified(checkpoint("mixtral"), tmp_path / "alone", "int4")
    assert not measured(alone)["max logit error"].passed
    assert EXPERTS not in measured(alone)
    followed = measured(verified(checkpoint("mixtral"), tmp_path / "followed", "int4"))
    assert followed["max logit error"].passed
    assert "near-ties" in followed[EXPERTS].detail


@pytest.mark.as_users
@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["another layer's router", "another norm before the router", "one expert less"])
@pytest.mark.parametrize(("name", "weights"), [("gpt-oss", "int8"), ("mixtral", "fp32")])
def test_a_mistake_of_a_router_is_noticed(
    mistake: str, name: str, weights: str, checkpoint: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    planted: list[str] = []
    layer = "model.layers.1"
    tensor, norm, experts = Layers.tensor, Layers.norm, Layers._experts

    def wrong_tensor(layers: Layers, asked: str) -> Any:
        if asked == f"{layer}.{ROUTER}":
            planted.append(asked)
            asked = f"model.layers.0.{ROUTER}"
        return tensor(layers, asked)

    def wrong_norm(layers: Layers, x: Any, asked: str) -> Any:
        if asked == f"{layer}.post_attention_layernorm":
            planted.append(asked)
            asked = f"{layer}.input_layernorm"
        return norm(layers, x, asked)

    def fewer(layers: Layers, x: Any, asked: str) -> Any:
        whole = layers.config
        part = whole.description.experts
        assert part is not None
        planted.append(asked)
        layers.config = replace(whole, description=replace(whole.description, experts=replace(part, chosen=1)))
        try:
            return experts(layers, x, asked)
        finally:
            layers.config = whole

    if mistake == "another layer's router":
        monkeypatch.setattr(Layers, "tensor", wrong_tensor)
    elif mistake == "another norm before the router":
        monkeypatch.setattr(Layers, "norm", wrong_norm)
    else:
        monkeypatch.setattr(Layers, "_experts", fewer)
    report = verified(checkpoint(name), tmp_path / "engine", weights)
    assert planted
    assert not report.passed
    failed = {check for check, found in measured(report).items() if found.passed is False}
    assert ("max logit error" in failed) or (EXPERTS in failed)
