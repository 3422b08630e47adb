"""Capped logits and sinks of attention under every policy: verified where it takes them, else refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from kvc_trt import Engine, build, policies
from kvc_trt.backends.tensorrt.lowering import PLUGINS, lower
from kvc_trt.contexts.packing import recorded_model
from kvc_trt.errors import InputError
from kvc_trt.graph.rewrites.native import native_in
from kvc_trt.models.sharding import shards
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.native import native_name
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.operators.softmax import SINK_LOGITS
from tests.backends.tensorrt.weightless import weightless_graphs
from tests.graph.small_models import resolve
from tests.oracles.family_models import our_config, written

MODELS = {"gemma2-within-its-window": "capped logits", "gpt-oss-within-its-window": "sinks"}
TAKEN = (
    "duo-attention", "full", "hybrid", "keydiff", "pyramidkv", "quest", "quest-matched", "rocketkv", "rocketkv-mt",
    "rocketkv-v1", "rocketkv-v2", "sliding-window", "snapkv", "snapkv++", "snapkv-gqa", "streaming-llm",
)  # fmt: skip
LIKE_OTHERS = ("duo-attention", "pyramidkv", "quest-matched", "rocketkv-v1", "rocketkv-v2", "snapkv-gqa")
"""Policies of the same kinds as others that are verified."""
REFUSED = sorted({name for name, *_ in policies.available()} - set(TAKEN))
Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    @cache
    def made(name: str) -> Path:
        path = tmp_path_factory.mktemp(name) / "checkpoint"
        written(name, path)
        return path

    return made


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("policy", [one for one in TAKEN if one not in LIKE_OTHERS])
def test_engines_with_caps_and_sinks_pass_verification(
    policy: str, backend: str, model: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {} if policy == "full" else {"token_budget": 128 if policy == "snapkv" else 64}
    _check(checkpoints(model), tmp_path, backend, policy=policy, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_experts_with_a_clamped_gate_verify(weights: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    _check(checkpoints("gpt-oss-within-its-window"), tmp_path, "onnxruntime", weights=weights, token_budget=64)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_budgets_set_for_each_prompt_verify(model: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """KvcCompactRanked votes too."""
    settings = {"token_budget": 64, "layer_budget": "squeeze-online"}
    _check(checkpoints(model), tmp_path, "onnxruntime", policy="snapkv++", **settings)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("model", MODELS)
def test_an_engine_that_reads_its_last_tokens_verifies(
    model: str, backend: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    _check(checkpoints(model), tmp_path, backend, policy="rocketkv", token_budget=64, recent=5)


def _check(checkpoint: Path, directory: Path, backend: str, **settings: Any) -> None:
    lengths = {"max_input_len": 256, "max_output_len": 32}
    build(str(checkpoint), output=directory / "engine", verify=False, **settings, **lengths)
    with Engine.open(directory / "engine", backend=backend, threads=1) as engine:
        report = engine.verify(level="quick", steps=3, samples=1)
        assert report.passed, report.failures


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", REFUSED)
def test_policies_that_score_without_caps_or_sinks_are_refused(policy: str, model: str) -> None:
    with pytest.raises(InputError, match=f"policy {policy}: .* without the {MODELS[model]}( of attention)? of "):
        resolve(policy, our_config(model))


def test_heads_cached_apart_are_refused_for_models_with_sinks() -> None:
    apart = {"token_budget": 150, "sinks": 4, "recent": 20, "head_scores": [[0.9, 0.1], [0.2, 0.8]]}
    assert resolve("duo-attention", our_config("gemma2-within-its-window"), **apart).retrieval_heads is not None
    with pytest.raises(InputError, match="sinks of GptOssForCausalLM are not divided among them"):
        resolve("duo-attention", our_config("gpt-oss-within-its-window"), **apart)


@pytest.mark.parametrize("model", ["gemma2-within-its-window", "gpt-oss"])
def test_tensor_parallel_ranks_refuse_caps_and_sinks(model: str) -> None:
    with pytest.raises(InputError, match=r"capped logits, sinks of attention|feed-forward blocks of experts"):
        shards(our_config(model), 2)


def test_tensorrt_refuses_caps_and_sinks() -> None:
    model = our_config("gemma2-within-its-window")
    for graph in weightless_graphs(model, resolve("rocketkv", model), "bf16"):
        with pytest.raises(InputError, match="TensorRT has no kernel for attention with capped logits or sinks"):
            lower(graph, tensorrt=(11, 4), plugins=PLUGINS)


@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
def test_models_without_caps_and_sinks_are_recorded_as_before(name: str) -> None:
    """Otherwise no context of an older engine would fit a new one."""
    model = our_config(name)
    later = model.description.later_parts
    assert later
    assert later.keys().isdisjoint(recorded_model(model)["description"])
    assert not any(part in model.identity for part in later)
    capped = our_config("gemma2")
    assert recorded_model(capped)["description"]["attention_softcap"] == 1.5
    assert "attention_softcap=1.5" in capped.identity


def test_no_native_operator_replaces_attention_with_caps_or_sinks() -> None:
    every = {native_name(name, {}) for name in OPERATORS}
    inputs = [*(tensor.name for tensor in OPERATORS["KvcDenseAttention"].inputs), SINK_LOGITS]
    calls = [helper.make_node("KvcDenseAttention", inputs, [], domain=KVC_DOMAIN, softmax=code) for code in (0, 1, 2)]
    assert [list(native_in([call], every)) for call in calls] == [["KvcDenseAttention"], [], []]
