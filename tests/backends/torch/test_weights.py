"""Weights read once: joined matrices hold their parts' rows, in the stored bits where the types are equal."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from kvc_trt.backends.torch.device import from_numpy, to_numpy
from kvc_trt.backends.torch.model.weights import TorchWeights, joined_names
from kvc_trt.graph.weights import EngineWeights
from tests.small_model import SMALL as MODEL

CPU = torch.device("cpu")
BIASED = replace(MODEL, qkv_bias=True, output_bias=True, tie_word_embeddings=True)


def test_projections_of_one_input_are_one_matrix():
    names = dict(joined_names(BIASED))
    assert names["self_attn.qkv_proj.weight"] == [f"self_attn.{part}_proj.weight" for part in "qkv"]
    assert names["self_attn.qkv_proj.bias"] == [f"self_attn.{part}_proj.bias" for part in "qkv"]
    assert names["mlp.gate_up_proj.weight"] == ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    assert names["self_attn.o_proj.bias"] == ["self_attn.o_proj.bias"]
    normed = dict(joined_names(replace(MODEL, architecture="Qwen3ForCausalLM", qk_norm=True)))
    assert normed["self_attn.q_norm.weight"] == ["self_attn.q_norm.weight"]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_stored_bits_are_read_unchanged(precision, make_program):
    source = EngineWeights(make_program("full", precision, model=BIASED).weight_file)
    dtype = getattr(torch, source.dtype("model.norm.weight"))
    weights = TorchWeights.read(BIASED, source, CPU, dtype)
    parts = [source.read(f"model.layers.1.self_attn.{name}_proj.weight") for name in "qkv"]
    found = to_numpy(weights.layers[1]["self_attn.qkv_proj.weight"])
    assert found.dtype == parts[0].dtype
    np.testing.assert_array_equal(found, np.concatenate(parts))
    assert weights.head is weights.embedding


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_weights_are_widened_and_a_tied_head_is_the_embedding(precision, make_program):
    source = EngineWeights(make_program("full", precision, model=BIASED).weight_file)
    weights = TorchWeights.read(BIASED, source, CPU, torch.float32)
    np.testing.assert_array_equal(weights.head.numpy(), source.read("model.embed_tokens.weight"))
    assert weights.head is weights.embedding


def test_a_read_takes_one_chunk_beside_its_result(make_program):
    """A read asks the source for rows, so no widened copy of a tensor is made."""
    source = EngineWeights(make_program("full", "bf16").weight_file)
    source.read = None
    assert TorchWeights.read(MODEL, source, CPU, torch.bfloat16).embedding.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_arrays_keep_type_and_values_between_numpy_and_torch(dtype):
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    array = np.arange(-6, 6).reshape(3, 4).astype(kind)
    tensor = from_numpy(array)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.float().tolist() == array.astype(np.float32).tolist()
    back = to_numpy(tensor.T)
    assert back.dtype == kind
    np.testing.assert_array_equal(back, array.T)
    array.flags.writeable = False
    assert from_numpy(array).tolist() == tensor.tolist()
