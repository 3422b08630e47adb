"""A small engine with random weights, whose compaction and selection are both at work."""

from __future__ import annotations

import dataclasses

import pytest

from kvc_trt.models.config import ModelConfig
from tests.small_model import SMALL


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    return dataclasses.replace(SMALL, num_hidden_layers=2, eos_token_ids=())


@pytest.fixture(scope="session")
def engine(model, tmp_path_factory):
    """Policy rocketkv, budget 64, prompts up to 512 tokens and 32 new ones."""
    import onnx

    from kvc_trt.config import BuildConfig
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.engine.configuration import EngineConfig
    from kvc_trt.engine.manifest import Manifest
    from kvc_trt.files.held import HeldFile
    from kvc_trt.graph.build import build_decode, build_prefill
    from kvc_trt.graph.weights import GraphWeights, write_weights
    from kvc_trt.models.random_weights import RandomWeights
    from kvc_trt.policies import resolve

    parameters = resolve("rocketkv", model=model, token_budget=64, max_input_len=512, max_output_len=32, pool_kernel=7)
    path = tmp_path_factory.mktemp("engines") / "small"
    path.mkdir()
    write_weights(model, RandomWeights(model, 0), path / "weights.safetensors", weights="fp32", length=544)
    weights = GraphWeights(path / "weights.safetensors")
    onnx.save(build_prefill(model, parameters, weights=weights), path / "prefill.onnx")
    onnx.save(build_decode(model, parameters, weights=weights), path / "decode.onnx")
    build = BuildConfig(
        model="small", token_budget=64, max_input_len=512, max_output_len=32, weights="fp32", backend="onnxruntime"
    )
    config = EngineConfig(model, parameters, build, turns=False)
    held = {file.name: HeldFile(file) for file in path.iterdir()}
    return EngineDirectory(path, config, Manifest.model_construct(files={}), held)
