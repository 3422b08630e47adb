"""The networks compute the same as the ONNX graphs: both are evaluated on the same weights and prompts.

`evaluator.py` evaluates them in numpy, not TensorRT. It says nothing about engines.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnxruntime
import pytest

from kvc_trt import policies
from kvc_trt.backends.tensorrt_llm.build import build_plan
from kvc_trt.backends.tensorrt_llm.layers import NetworkLayers
from kvc_trt.backends.tensorrt_llm.networks import define_decode, define_prefill
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.models.config import RopeScaling
from kvc_trt.models.random_weights import RandomWeights
from tests.backends.tensorrt_llm.evaluator import Registry, evaluator
from tests.small_model import SMALL

LLAMA = dataclasses.replace(SMALL, num_hidden_layers=2, rotary_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64))
QWEN2 = dataclasses.replace(LLAMA, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_word_embeddings=True)
QWEN3 = dataclasses.replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True, rotary_scaling=None)
BIASED = dataclasses.replace(LLAMA, qkv_bias=True, output_bias=True, num_key_value_heads=4)
CASES = {
    "rocketkv": (LLAMA, {"policy": "rocketkv", "pool_kernel": 7, "skip_layers": 1}),
    "rocketkv-fp8": (LLAMA, {"policy": "rocketkv", "pool_kernel": 7, "skip_layers": 1, "fp8_bounds": True}),
    "hybrid": (QWEN2, {"policy": "hybrid"}),
    "snapkv++": (QWEN3, {"policy": "snapkv++", "pool_kernel": 7}),
    "full": (BIASED, {"policy": "full"}),
    "pyramidkv": (LLAMA, {"policy": "pyramidkv", "window": 8, "pool_kernel": 7}),
}
LENGTHS = np.array([200, 70], np.int64)


def _case(name):
    model, policy = CASES[name]
    return model, policies.resolve(model=model, token_budget=32, max_input_len=230, max_output_len=16, **policy)


def _layers(api, model, parameters):
    return NetworkLayers(api, model, RandomWeights(model, 0), parameters.max_sequence_len)


def _run(feeds, define, dtype="float32", registry=None):
    api, network, registry, previews = evaluator(feeds, registry)
    plan = build_plan(api, dtype, lambda: define(api))
    assert previews == [("ALIASED_PLUGIN_IO_10_03", True)]
    return network, plan


def _prefill_feeds():
    ids = np.random.default_rng(0).integers(0, LLAMA.vocab_size, (2, 256), dtype=np.int64)
    return {"input_ids": ids, "prompt_lengths": LENGTHS}


@pytest.fixture(scope="module", params=list(CASES))
def runs(request, tmp_path_factory):
    """Both phases of one case: outputs by name of ONNX Runtime and of the evaluated networks."""
    model, parameters = _case(request.param)
    directory, weights = tmp_path_factory.mktemp("graphs"), RandomWeights(model, 0)
    write_weights(model, weights, directory / "weights.safetensors", weights="fp32", length=parameters.max_sequence_len)
    stored = GraphWeights(directory / "weights.safetensors")

    def onnx(build, feeds):
        path = directory / "graph.onnx"
        path.write_bytes(build(model, parameters, weights=stored).SerializeToString())
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return dict(zip((one.name for one in session.get_outputs()), session.run(None, feeds), strict=True))

    feeds = _prefill_feeds()
    expected = onnx(build_prefill, feeds)
    prefill, _ = _run(feeds, lambda api: define_prefill(_layers(api, model, parameters), parameters, 2))
    state = {tensor.name: expected[tensor.name] for tensor in state_tensors(model, parameters, "float32")}
    step = {
        "token": np.array([5, 11], np.int64),
        "positions": LENGTHS,
        "cache_lengths": expected["cache_lengths"],
        **state,
    }
    stepped = onnx(build_decode, {name: value.copy() for name, value in step.items()})
    until = parameters.slice_limit
    decode, _ = _run(step, lambda api: define_decode(_layers(api, model, parameters), parameters, 2, until))
    return model, parameters, (expected, prefill), (stepped, decode)


@pytest.mark.parametrize("phase", [2, 3], ids=["prefill", "decode"])
def test_networks_compute_the_graphs_values(runs, phase):
    expected, network = runs[phase]
    assert set(network.outputs) == set(expected)
    for name, value in expected.items():
        found = network.outputs[name]
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        np.testing.assert_allclose(found, value, rtol=2e-4, atol=2e-4, err_msg=name)


def test_every_layer_has_its_plugins(runs):
    model, parameters, (_, prefill), (_, decode) = runs
    paged = model.num_hidden_layers - parameters.skip_layers if parameters.decode_selection == "hybrid" else 0
    assert prefill.plugins == {"KvcCompact": model.num_hidden_layers}
    expected = {"KvcHybridAttention": paged, "KvcDenseAttention": model.num_hidden_layers - paged}
    assert decode.plugins == {name: count for name, count in expected.items() if count}


def test_inputs_are_those_of_the_graphs(runs):
    model, parameters, (_, prefill), (_, decode) = runs
    assert prefill.inputs == ["input_ids", "prompt_lengths"]
    state = [tensor.name for tensor in state_tensors(model, parameters, "float32")]
    assert decode.inputs == ["token", "positions", "cache_lengths", *state]


@pytest.mark.parametrize(("dtype", "decomposable"), [("float16", False), ("float32", True)])
def test_only_fp32_attention_may_be_taken_apart(dtype, decomposable):
    model, parameters = _case("full")
    model = dataclasses.replace(model, dtype=dtype)
    network, _ = _run(
        _prefill_feeds(), lambda api: define_prefill(_layers(api, model, parameters), parameters, 2), dtype
    )
    assert [attention.decomposable for attention in network.decomposable] == [decomposable] * model.num_hidden_layers
    assert {str(network.outputs[f"k_cache.{layer}"].dtype) for layer in range(model.num_hidden_layers)} == {dtype}
    assert network.outputs["logits"].dtype == np.float32


def test_bfloat16_weights_and_activations_never_meet_another_type():
    model, parameters = _case("full")
    model = dataclasses.replace(model, dtype="bfloat16")

    def first_layer(api):
        layers = _layers(api, model, parameters)
        ranges = {"batch": [[1, 2, 2]], "sequence": [[1, 256, 256]]}
        x = layers.embed(api.make_tensor("input_ids", "int64", [-1, -1], ranges).view([-1]))
        normed = layers.norm(x, "model.layers.0.input_layernorm.weight")
        layers.linear(normed, "model.layers.0.self_attn.q_proj").mark_output("q", "bfloat16")
        layers.feed_forward(normed, "model.layers.0").mark_output("mlp", "bfloat16")

    network, _ = _run(_prefill_feeds(), first_layer, "bfloat16")
    assert set(network.outputs) == {"q", "mlp"}


def test_a_missing_plugin_stops_the_build():
    model, parameters = _case("rocketkv")
    registry = Registry(("KvcDenseAttention",))
    with pytest.raises(UnsupportedEnvironment, match="kvc::KvcCompact is not registered"):
        _run(
            _prefill_feeds(),
            lambda api: define_prefill(_layers(api, model, parameters), parameters, 2),
            registry=registry,
        )


def test_a_refused_network_is_an_error_without_a_traceback():
    with pytest.raises(UnsupportedEnvironment, match=r"TensorRT-LLM 1\.2\.1 could not build the engine"):
        _run({}, lambda api: None)
