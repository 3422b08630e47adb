from __future__ import annotations

import onnx
import pytest

from kvc_trt import policies
from kvc_trt.engine.program import Program
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.models.random_weights import RandomWeights
from tests.plugins_cpu.libraries import library
from tests.small_model import SMALL

__all__ = ["library", "make_program"]

MODEL = SMALL


@pytest.fixture(scope="session")
def make_program(tmp_path_factory):
    """make(policy, precision="fp32", ...) writes a small random model and returns it as a program."""

    def make(policy, precision="fp32", *, max_input_len=256, max_output_len=16, token_budget=32, **overrides):
        parameters = policies.resolve(
            policy,
            model=MODEL,
            token_budget=token_budget,
            max_input_len=max_input_len,
            max_output_len=max_output_len,
            **overrides,
        )
        directory = tmp_path_factory.mktemp("program")
        path = directory / "weights.safetensors"
        length = parameters.max_sequence_len
        write_weights(MODEL, RandomWeights(MODEL, 0), path, weights=precision, length=length)
        weights = GraphWeights(path)
        onnx.save(build_prefill(MODEL, parameters, weights=weights), directory / "prefill.onnx")
        onnx.save(build_decode(MODEL, parameters, weights=weights), directory / "decode.onnx")
        state = state_tensors(MODEL, parameters, weights.dtype)
        return Program(MODEL, parameters, state, path, directory / "prefill.onnx", directory / "decode.onnx")

    return make


@pytest.fixture(scope="session")
def rocketkv(make_program):
    return make_program("rocketkv", pool_kernel=7, skip_layers=1)
