"""A build's calls in order, and what stops it. Plans here are lists of output names (`evaluator.py`), not engines."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.backends.tensorrt.machine import Gpu, Machine
from kvc_trt.backends.tensorrt.plugins import PluginLibrary
from kvc_trt.backends.tensorrt_llm import build, loading
from kvc_trt.config import BuildConfig
from kvc_trt.engine.model_choice import ModelSource, choose_model
from kvc_trt.engine.request import resolve
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
    monkeypatch.setattr(loading, "installed", INSTALLED.get)
    monkeypatch.setattr(build, "installed", INSTALLED.get)
    build._here.cache_clear()
    build._api_with_plugins.cache_clear()
    yield
    build._here.cache_clear()
    build._api_with_plugins.cache_clear()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(...) sets what this machine is said to have; by default all that a build takes."""

    def say(**facts):
        library = PluginLibrary("plugins", tmp_path / "libkvc_plugins.so", "0" * 64, ABI_VERSION, "cuda")
        whole = {
            "tensorrt": "10.14.1", "cuda_runtime": (13, 0), "driver": (13, 0), "gpu": GPU, "libraries": (library,),
        }  # fmt: skip
        monkeypatch.setattr(build, "look", lambda: Machine(**{**whole, **facts}))

    return say


@pytest.fixture
def request_and_source(tiny_model):
    config = BuildConfig(
        model=str(tiny_model), weights="fp32", token_budget=32, max_input_len=128, max_output_len=32, pool_kernel=7
    )
    choice = choose_model(config.model)
    request = resolve(config, choice, "tensorrt-llm", measure_break_even=lambda *arguments: 0)
    return request, ModelSource(RandomWeights(choice.config, 0), "random")


def test_the_target_names_all_that_the_engine_hangs_on(request_and_source, machine):
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
        ({"driver": None}, "NVIDIA driver"),
        ({"gpu": None}, "NVIDIA GPU"),
        ({"libraries": ()}, "plugin library"),
        ({"cuda_runtime": None, "cuda_problem": "not installed"}, "cuda-bindings"),
    ],
)
def test_what_the_machine_lacks_is_said(facts, message, request_and_source, machine):
    machine(**facts)
    with pytest.raises(UnsupportedEnvironment, match=message):
        build.target(request_and_source[0])


def test_without_tensorrt_llm_the_machine_is_not_even_looked_at(request_and_source, monkeypatch):
    monkeypatch.setattr(loading, "installed", {}.get)
    monkeypatch.setattr(build, "look", lambda: pytest.fail("looked"))
    with pytest.raises(UnsupportedEnvironment, match="needs Python package tensorrt_llm"):
        build.target(request_and_source[0])


def test_every_stage_has_a_maker(request_and_source):
    made = build.makers(*request_and_source, NullProgress())
    assert list(made) == ["weights", "prefill", "decode", "prefill.engine", "decode.engine"]


def test_makers_write_what_the_builder_returns(request_and_source, machine, monkeypatch, tmp_path):
    machine()
    request, source = request_and_source
    state = state_tensors(request.model, request.parameters, "float32")
    feeds = {
        "input_ids": np.zeros((1, 128), np.int64),
        "prompt_lengths": np.array([128]),
        "token": np.zeros(1, np.int64),
        "positions": np.array([128]),
        "cache_lengths": np.full((request.model.num_hidden_layers, 1), 40),
        **{one.name: np.full((1, *one.shape), one.fill, np.float32) for one in state},
    }
    apis, loaded = [], []

    def load():
        apis.append(evaluator(feeds))
        return apis[-1][0]

    monkeypatch.setattr(build, "load_builder_api", load)
    monkeypatch.setattr(build, "load_plugins", lambda library, trt: loaded.append((library.path.name, trt.__version__)))
    made = build.makers(request, source, NullProgress())
    assert apis == []
    made["prefill.engine"](tmp_path / "prefill.engine", finished=tmp_path)
    written = (tmp_path / "prefill.engine").read_bytes().decode().split()
    assert set(written) == {"logits", "cache_lengths", *(one.name for one in state)}
    apis[0][1].forget()
    made["decode.engine"](tmp_path / "decode.engine", finished=tmp_path)
    written = (tmp_path / "decode.engine").read_bytes().decode().split()
    assert set(written) == {"logits", *(one.aliased_output for one in state)}
    assert loaded == [("libkvc_plugins.so", "10.14.1")], "once for both plans"
