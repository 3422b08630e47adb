from __future__ import annotations

from pathlib import Path

import pytest

from kvc_trt import policies
from kvc_trt.backends.registry import open_engine
from kvc_trt.cli.main import run
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.program import Program
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.models.random_weights import RandomWeights
from tests.plugins_cuda.conftest import emulation, gpu, no_chosen_library, one_thread
from tests.small_model import SMALL as MODEL

__all__ = ["emulation", "engine", "gpu", "make_program", "no_chosen_library", "one_thread"]


@pytest.fixture(autouse=True)
def _alone(no_chosen_library):
    """Tests start without a library."""


@pytest.fixture(scope="session")
def make_program(tmp_path_factory):
    """make(policy, precision="fp32", model=MODEL, ...): a small random model, its weights without graphs."""

    def make(policy, precision="fp32", model=MODEL, **changes) -> Program:
        settings = {"token_budget": 32, "max_input_len": 256, "max_output_len": 16, **changes}
        if policy in ("rocketkv", "snapkv++"):
            settings.setdefault("pool_kernel", 7)
        parameters = policies.resolve(policy, model=model, **settings)
        directory: Path = tmp_path_factory.mktemp("program")
        path = directory / "weights.safetensors"
        write_weights(model, RandomWeights(model, 0), path, weights=precision, length=parameters.max_sequence_len)
        state = state_tensors(model, parameters, GraphWeights(path).dtype)
        return Program(model, parameters, state, path, directory / "none.onnx", directory / "none.onnx")

    return make


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> EngineDirectory:
    """retrieval-tiny under RocketKV, built for ONNX Runtime."""
    path = tmp_path_factory.mktemp("engines") / "tiny"
    settings = ["--model", "retrieval-tiny", "--token-budget", "64", "--max-input-len", "512", "--max-output-len", "32"]
    assert run(["build", *settings, "--no-verify", "-o", str(path)]) == 0
    return open_engine(path)
