"""Checkpoints that transformers itself writes, for every family: same configuration, same tensors."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.models.sources.checkpoint import Checkpoint
from kvc_trt.models.weights import check_weights, expected_tensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
MILLION = {"rope_type": "default", "rope_theta": 1e6}
FAMILIES = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3, "eos_token_id": [2, 3]}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 32}),
    "longchat": ("Llama", {"num_key_value_heads": 4, "rope_parameters": LINEAR}),
    "mistral-v0.1": ("Mistral", {"sliding_window": 128, "head_dim": 16}),
    "mistral-v0.2": ("Mistral", {"sliding_window": None, "rope_parameters": MILLION}),
    "qwen2.5": ("Qwen2", {"use_sliding_window": False, "rope_parameters": MILLION}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def saved(family, directory, dtype, shard_size="5GB"):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SHAPE | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_and_configuration_are_read_as_written(family, dtype, tmp_path):
    model = saved(family, tmp_path, getattr(torch, dtype))
    checkpoint = Checkpoint(tmp_path)
    config, theirs = checkpoint.config, model.config
    check_weights(config, checkpoint)
    state = model.state_dict()
    assert set(expected_tensors(config)) <= set(state)
    for name in expected_tensors(config):
        assert checkpoint.dtype(name) == dtype
        ours = checkpoint.read(name)
        assert ours.shape == tuple(state[name].shape)
        np.testing.assert_array_equal(ours.astype(np.float32), state[name].float().numpy())
    assert config.dtype == dtype
    assert config.rotary_base == theirs.rope_parameters["rope_theta"]
    assert (config.rotary_scaling.kind if config.rotary_scaling else "default") == theirs.rope_parameters["rope_type"]
    assert config.sliding_window == getattr(theirs, "sliding_window", None)
    assert config.head_size == model.model.layers[0].self_attn.head_dim
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert (config.qkv_bias, config.output_bias) == tuple(
        getattr(model.model.layers[0].self_attn, projection).bias is not None for projection in ("q_proj", "o_proj")
    )


def test_shards_are_read_as_written(tmp_path):
    model = saved("llama3.1", tmp_path, torch.float32, shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    checkpoint = Checkpoint(tmp_path)
    check_weights(checkpoint.config, checkpoint)
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.numpy())
