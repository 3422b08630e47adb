from __future__ import annotations

import json

import pytest

from kvc_trt.errors import InputError
from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.models.pretrained_config import from_pretrained_config, to_pretrained_config
from tests.oracles.family_models import MODELS, our_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
VARIANTS = [
    {},
    {"attention_bias": True, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    {"architectures": ["MistralForCausalLM"], "sliding_window": 128},
    {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0},
    {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
    {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64, "attention_bias": True},
    {"rope_scaling": {"type": "linear", "factor": 2.5}, "eos_token_id": [3, 4], "bos_token_id": None},
    {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "eos_token_id": None},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"mlp_bias": True, "attention_bias": True},
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_written_config_reads_back_through_json(tiny_config, variant):
    config = tiny_config(**variant)
    written = json.loads(json.dumps(to_pretrained_config(config)))
    assert from_pretrained_config(written, "engine") == config


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_reads_back(name):
    config = load_preset(name).config
    assert from_pretrained_config(to_pretrained_config(config), "engine") == config


@pytest.mark.parametrize("name", MODELS)
def test_every_family_reads_back(name):
    config = our_config(name)
    assert from_pretrained_config(json.loads(json.dumps(to_pretrained_config(config))), "engine") == config


def test_field_names_are_those_of_tensorrt_llm(tiny_config):
    written = to_pretrained_config(tiny_config())
    assert written["head_size"] == 16
    assert written["norm_epsilon"] == 1e-5
    assert written["position_embedding_type"] == "rope_gpt_neox"
    assert written["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert set(written) >= {"architecture", "rotary_base", "rotary_scaling", "quantization", "hidden_act", "dtype"}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("head_size", 15, "head_size"),
        ("norm_epsilon", -1, "norm_epsilon"),
        ("norm_epsilon", None, "norm_epsilon: expected a value, found null"),
        ("rotary_base", "big", "rotary_base"),
        ("architecture", "GPT", "architecture"),
        ("architecture", None, "architecture: expected a value, found null"),
        ("architecture", ["LlamaForCausalLM"], "architecture"),
        ("qk_norm", True, "qk_norm is True, expected False for LlamaForCausalLM"),
        ("qkv_bias", True, "output_bias is False, expected True"),
        ("output_bias", 1, "output_bias"),
        ("sliding_window", 64, "sliding_window"),
        ("tie_word_embeddings", None, "tie_word_embeddings"),
        ("eos_token_ids", [99], "eos_token_ids"),
        ("rotary_scaling", {"rope_type": "proportional"}, "rope_type"),
        ("rotary_scaling", {"rope_type": "longrope", "short_factor": [1.0]}, "missing key 'long_factor'"),
        ("description", {"norms": {"kind": "batch"}}, "description: norms.kind"),
        ("description", {"embedding_scale": 2.0}, "description.embedding_scale is 2.0, expected 1.0 for Llama"),
        ("description", {"attention": [{"rotary": False}]}, "description.attention is"),
        ("description", {"norms": {"place": "after"}}, "description.norms.place is 'after', expected 'before'"),
        ("description", {"feed_forward": {"gated": False}}, "description.feed_forward.gated is False, expected True"),
        ("description", {"rotary_channels": 8}, "description.rotary_channels is 8, expected None"),
        ("hidden_act", "gelu", "hidden_act"),
    ],
)
def test_an_edited_file_is_refused_in_its_own_words(tiny_config, field, value, words):
    written = to_pretrained_config(tiny_config()) | {field: value}
    with pytest.raises(InputError, match=words):
        from_pretrained_config(written, "engine")


def test_biases_of_the_feed_forward_block_are_refused_in_a_family_without_them(tiny_config):
    written = to_pretrained_config(tiny_config(architectures=["Qwen2ForCausalLM"]))
    with pytest.raises(InputError, match=r"feed_forward\.bias is True, expected False for Qwen2ForCausalLM"):
        from_pretrained_config(written | {"description": {"feed_forward": {"bias": True}}}, "engine")


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_config_that_is_no_mapping_is_refused(value):
    with pytest.raises(InputError, match="engine"):
        from_pretrained_config(value, "engine")
