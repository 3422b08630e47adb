"""A build's calls in order, and its refusals. Plans here are lists of output names (`evaluator.py`), not engines."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.registry import backends
from kvc_trt.backends.tensorrt.format import plan_file
from kvc_trt.backends.tensorrt.machine import Gpu, GpuMachine
from kvc_trt.backends.tensorrt.plugins import PluginLibrary
from kvc_trt.backends.tensorrt_llm import build, builder_api
from kvc_trt.backends.tensorrt_llm.engine_directory import PHASES
from kvc_trt.cli.main import run
from kvc_trt.config import BuildConfig
from kvc_trt.engine.build import build_engine
from kvc_trt.engine.resolution.model_choice import ModelSource, choose_model
from kvc_trt.engine.resolution.resolve import resolve
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import state_tensors
from kvc_trt.kernels.structs import ABI_VERSION
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.progress import NullProgress
from tests.backends.tensorrt_llm.evaluator import evaluator

INSTALLED = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1"}
GPU = Gpu("NVIDIA H200", (9, 0), 141 << 30, 140 << 30)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(builder_api, "installed", INSTALLED.get)
    monkeypatch.setattr(build, "installed", INSTALLED.get)
    build._here.cache_clear()
    build._api_with_plugins.cache_clear()
    yield
    build._here.cache_clear()
    build._api_with_plugins.cache_clear()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(...) sets the reported facts of this machine; by default it has all that a build takes."""

    def say(**facts):
        library = PluginLibrary("plugins", tmp_path / "libkvc_plugins.so", "0" * 64, ABI_VERSION, "cuda")
        whole = {
            "tensorrt": "10.14.1", "cuda_runtime": (13, 0), "driver": (13, 0), "gpu": GPU, "libraries": (library,),
        }  # fmt: skip
        monkeypatch.setattr(build, "inspect_machine", lambda: GpuMachine(**{**whole, **facts}))

    return say


@pytest.fixture
def request_and_source(tiny_model):
    config = BuildConfig(
        model=str(tiny_model), weights="fp32", token_budget=32, max_input_len=128, max_output_len=32, pool_kernel=7
    )
    choice = choose_model(config.model)
    request = resolve(config, choice, "tensorrt-llm", backends())
    return request, ModelSource(RandomWeights(choice.config, 0), "random")


def test_the_target_names_everything_that_the_engine_depends_on(request_and_source, machine):
    machine()
    assert build.target(request_and_source[0]) == {
        "backend": "tensorrt-llm",
        "architecture": "sm_90",
        "tensorrt": "10.14.1",
        "tensorrt_llm": "1.2.1",
        "plugins": {"file": "libkvc_plugins.so", "sha256": "0" * 64, "abi": ABI_VERSION},
        "compatibility": "none",
    }


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"tensorrt": "10.13.3"}, "TensorRT: expected 10.14 or newer, found 10.13.3"),
        ({"driver": None}, "NVIDIA driver"),
        ({"gpu": None}, "NVIDIA GPU"),
        ({"libraries": ()}, "plugin library"),
        ({"cuda_runtime": None, "cuda_problem": "not installed"}, "cuda-bindings"),
    ],
)
def test_each_missing_part_of_the_machine_is_named(facts, message, request_and_source, machine):
    machine(**facts)
    with pytest.raises(UnsupportedEnvironment, match=message):
        build.target(request_and_source[0])


def test_without_tensorrt_llm_the_machine_is_not_even_looked_at(request_and_source, monkeypatch):
    monkeypatch.setattr(builder_api, "installed", {}.get)
    monkeypatch.setattr(build, "inspect_machine", lambda: pytest.fail("looked"))
    with pytest.raises(UnsupportedEnvironment, match="needs Python package tensorrt_llm"):
        build.target(request_and_source[0])


def test_every_stage_has_a_maker(request_and_source):
    made = build.makers(*request_and_source, NullProgress())
    assert list(made) == ["prefill.engine", "decode.engine"]


@pytest.fixture
def builder(request_and_source, machine, monkeypatch):
    """The evaluator in place of TensorRT-LLM, with inputs for both networks; returns the loaded names, in order."""
    machine()
    request, _ = request_and_source
    feeds = {
        "input_ids": np.zeros((1, 128), np.int64),
        "prompt_lengths": np.array([128]),
        "token": np.zeros(1, np.int64),
        "positions": np.array([128]),
        "cache_lengths": np.full((request.model.num_hidden_layers, 1), 40),
        **{one.name: np.full((1, *one.shape), one.fill, np.float32) for one in _state(request)},
    }
    loaded = []

    def load_builder_api():
        loaded.append("tensorrt_llm")
        return evaluator(feeds)[0]

    monkeypatch.setattr(build, "load_builder_api", load_builder_api)
    monkeypatch.setattr(build, "load_plugins", lambda library, trt: loaded.append(library.path.name))
    return loaded


def _state(request):
    return state_tensors(request.model, request.parameters, "float32")


def test_makers_write_what_the_builder_returns(request_and_source, builder, tmp_path):
    request, source = request_and_source
    made = build.makers(request, source, NullProgress())
    assert builder == []
    for stage in ("prefill.engine", "decode.engine"):
        made[stage](tmp_path / stage, finished=tmp_path)
    assert builder == ["tensorrt_llm", "libkvc_plugins.so"], "once for both plans"
    written = {stage: set((tmp_path / f"{stage}.engine").read_text().split()) for stage in ("prefill", "decode")}
    assert written["prefill"] == {"logits", "cache_lengths", *(one.name for one in _state(request))}
    assert written["decode"] == {"logits", *(one.aliased_output for one in _state(request))}


def test_a_build_is_an_engine_directory_that_can_be_exported(request_and_source, builder, tmp_path, capfd):
    request, source = request_and_source
    result = build_engine(request, source, tmp_path / "engine", backends(), force=False, progress=NullProgress())
    engine = result.engine
    assert open_engine(engine.path).backend == "tensorrt-llm"
    assert run(["export", "tensorrt-llm", str(engine.path), "-o", str(tmp_path / "out")]) == 0
    tokens = []
    for phase in PHASES:
        exported = tmp_path / "out" / phase
        assert (exported / "rank0.engine").read_bytes() == (engine.path / plan_file(phase)).read_bytes()
        config = json.loads((exported / "config.json").read_bytes())
        assert config["version"] == "1.2.1"
        assert config["pretrained_config"] == engine.config.to_json()["pretrained_config"]
        tokens.append(config["build_config"]["max_num_tokens"])
    assert tokens == [8 * 128, 8]
    assert run(["export", "llm-api", str(engine.path)]) == 0
    capfd.readouterr()
