"""The twin runs, is dense, takes no second copy of the weights, and leaves nothing behind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvc_trt.engine.twin import dense_twin, temporary_twin
from kvc_trt.models.config import ModelConfig


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    import onnx

    from kvc_trt.config import BuildConfig
    from kvc_trt.engine import Engine
    from kvc_trt.graph.build import build_decode, build_prefill
    from kvc_trt.graph.state import state_tensors
    from kvc_trt.graph.weights import GraphWeights, write_weights
    from kvc_trt.models.random_weights import RandomWeights
    from kvc_trt.policies import resolve

    model = ModelConfig(
        "LlamaForCausalLM", "float32", 50, 32, 48, 2, 2, 1, 16, 1e-5, 1e4, None, 512, False, False, False, False,
        None, None, (),
    )  # fmt: skip
    parameters = resolve("rocketkv", model=model, token_budget=64, max_input_len=256, max_output_len=32, pool_kernel=7)
    path = tmp_path_factory.mktemp("engines") / "small"
    path.mkdir()
    write_weights(model, RandomWeights(model, 0), path / "weights.safetensors", weights="fp32", length=288)
    weights = GraphWeights(path / "weights.safetensors")
    onnx.save(build_prefill(model, parameters, weights=weights), path / "prefill.onnx")
    onnx.save(build_decode(model, parameters, weights=weights), path / "decode.onnx")
    state = [dataclasses.asdict(tensor) for tensor in state_tensors(model, parameters, "float32")]
    config = {"kv_compression": {"parameters": dataclasses.asdict(parameters), "state": state}}
    return Engine(path, config, {}, {}, model, parameters, BuildConfig(model="small"))


def first_and_next_logits(engine, prompt):
    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

    executor = OnnxRuntimeExecutor(engine, threads=1)
    executor.allocate(1)
    padded = np.zeros((1, 256), np.int64)
    padded[0, : len(prompt)] = prompt
    prefilled = executor.prefill(padded, np.array([len(prompt)]))
    executor.insert(prefilled, 0, 0)
    following = executor.decode(np.array([7]), np.array([len(prompt)]), prefilled.cache_lengths)
    return prefilled.logits.copy(), following.copy(), prefilled.cache_lengths


def test_the_twin_keeps_everything(engine):
    prompt = np.random.default_rng(0).integers(0, 50, 200)
    with temporary_twin(engine) as twin:
        assert twin.parameters.policy == "full"
        assert twin.weights_path.stat().st_ino == engine.weights_path.stat().st_ino
        mine, theirs = first_and_next_logits(engine, prompt), first_and_next_logits(twin, prompt)
        directory = twin.path
    assert not directory.exists()
    np.testing.assert_array_equal(mine[0], theirs[0])  # the first token comes from dense prefill on both sides
    assert not np.array_equal(mine[1], theirs[1])
    assert (theirs[2] == 200).all()
    assert (mine[2] < 200).all()


def test_a_prompt_within_the_budget_is_bit_identical(engine):
    prompt = np.random.default_rng(1).integers(0, 50, 40)
    with temporary_twin(engine) as twin:
        mine, theirs = first_and_next_logits(engine, prompt), first_and_next_logits(twin, prompt)
    np.testing.assert_array_equal(mine[1], theirs[1])


def test_weights_are_copied_where_they_cannot_be_linked(engine, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("another volume")

    monkeypatch.setattr("os.link", refuse)
    twin = dense_twin(engine, tmp_path)
    assert twin.weights_path.read_bytes() == engine.weights_path.read_bytes()
    assert twin.weights_path.stat().st_ino != engine.weights_path.stat().st_ino
