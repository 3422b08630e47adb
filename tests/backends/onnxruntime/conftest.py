from __future__ import annotations

import onnx
import pytest

from kvc_trt import policies
from kvc_trt.backends.onnxruntime.program import Program
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.random_weights import RandomWeights

MODEL = ModelConfig(
    architecture="LlamaForCausalLM", dtype="float32", vocab_size=97, hidden_size=64, intermediate_size=96,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_size=16, norm_epsilon=1e-5,
    rotary_base=10000.0, rotary_scaling=None, max_position_embeddings=8192, tie_word_embeddings=False,
    qkv_bias=False, output_bias=False, qk_norm=False, sliding_window=None, bos_token_id=None, eos_token_ids=(1,),
)  # fmt: skip


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
