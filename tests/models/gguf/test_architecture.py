from __future__ import annotations

import pytest

from kvc_trt.errors import InputError
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from tests.models.gguf.tiny import LAYERS, vocabulary, write


@pytest.fixture
def config(tmp_path):
    def read(**options):
        return GgufCheckpoint(write(tmp_path / "model.gguf", **options)).config

    return read


def test_the_metadata_are_the_configuration(config):
    found = config(changes={"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2})
    assert found.architecture == "LlamaForCausalLM"
    assert (found.num_hidden_layers, found.hidden_size, found.intermediate_size) == (LAYERS, 256, 512)
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_size) == (4, 2, 64)
    assert found.vocab_size == len(vocabulary()[0])
    assert found.max_position_embeddings == 1024
    assert found.bos_token_id == 1
    assert found.eos_token_ids == (2, 0)
    assert found.rotary_scaling is None
    assert not found.tie_word_embeddings
    assert config(tied=True).tie_word_embeddings


DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "float32"}


@pytest.mark.parametrize(("kind", "dtype"), DTYPES.items())
def test_the_type_is_that_of_the_embedding(config, kind, dtype):
    assert config(kind=kind).dtype == dtype


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}


@pytest.mark.parametrize("changes", [LINEAR, {"rope.scale_linear": 4.0}])
def test_linear_scaling_is_read(config, changes):
    scaling = config(changes=changes).rotary_scaling
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)


def test_a_scaling_that_is_switched_off_is_ignored(config):
    assert config(changes={"rope.scaling.type": "none", "rope.scaling.factor": 4.0}).rotary_scaling is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "bloom"}, "general.architecture is 'bloom', expected one of chatglm, cohere2, command-r, "),
        ({"absent": ("embedding_length",)}, "missing key 'llama.embedding_length'"),
        ({"changes": {"block_count": 5000}}, "llama.block_count: .*1024, found 5000"),
        ({"changes": {"attention.head_count": [4, 4]}}, "llama.attention.head_count is an array of 2, expected one"),
        ({"changes": {"attention.head_count": "4"}}, "llama.attention.head_count: .*integer, found '4'"),
        ({"changes": {"attention.head_count_kv": 3}}, "llama.attention.head_count_kv is 3, expected a divisor of"),
        ({"changes": {"attention.layer_norm_rms_epsilon": float("nan")}}, r"llama.*rms_epsilon: .*, found nan"),
        ({"changes": {"vocab_size": 7}}, "llama.vocab_size is 7, expected 340, the rows of token_embd.weight"),
        ({"changes": {"attention.key_length": 32}}, "llama.rope.dimension_count is 64, expected 32, the width"),
        ({"changes": {"attention.value_length": 32}}, "llama.attention.value_length is 32, expected 64"),
        ({"changes": {"rope.scaling.type": "longrope"}}, "llama.rope.scaling.type is 'longrope', expected none"),
        ({"changes": {"rope.scaling.type": "yarn"}}, "llama.rope.scaling.factor is None, expected a number of at"),
        ({"architecture": "qwen2", "changes": {"expert_count": 8}}, "qwen2.expert_count is 8, expected 0: nothing"),
        ({"changes": {"expert_count": 8}}, "missing key 'llama.expert_used_count'"),
        ({"changes": {"expert_count": 8, "expert_used_count": 9}}, "num_experts_per_tok is 9, expected at most the 8"),
        ({"changes": {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2}}, "llama.expert_gating_func"),
        ({"changes": {"attention.sliding_window": 512}}, "llama.attention.sliding_window is 512, expected 0"),
        ({"changes": {"logit_scale": 8.0}}, "llama.logit_scale is 8.0, expected 0.0"),
        ({"changes": {"attention.causal": False}}, "llama.attention.causal is False, expected True"),
        ({"changes": {"tokenizer.ggml.eos_token_id": 5000}}, "tokenizer.ggml.eos_token_id is 5000, expected a token"),
        ({"changes": {"tokenizer.ggml.eot_token_id": 5000}}, "tokenizer.ggml.eot_token_id is 5000, expected a token"),
        ({"changes": {"tokenizer.ggml.eom_token_id": "abc"}}, "tokenizer.ggml.eom_token_id is 'abc', expected a token"),
        ({"changes": {"rope.scaling.factor": -1.0}}, "llama.rope.scaling.factor is -1.0, expected a number of"),
        ({"changes": {"rope.scale_linear": "a"}}, "llama.rope.scale_linear is 'a', expected a number of at least 1"),
        ({"absent": ("token_embd.weight",)}, "tensor token_embd.weight is missing"),
    ],
)  # fmt: skip
def test_features_without_a_graph_are_refused_by_key(config, options, message):
    with pytest.raises(InputError, match=rf"model\.gguf: {message}") as caught:
        config(**options)
    assert "\n" not in caught.value.message


def test_neutral_values_of_unsupported_keys_are_accepted(config):
    config(changes={"expert_count": 0, "attention.causal": True, "logit_scale": 0.0, "rope.scaling.attn_factor": 1.0})
