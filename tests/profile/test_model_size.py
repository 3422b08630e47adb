"""Parameter counts against transformers' own, and bytes against known models."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvc_trt import policies
from kvc_trt.models.presets import load_preset
from kvc_trt.models.sources.hugging_face import parse_config
from kvc_trt.profile.accelerators import accelerator
from kvc_trt.profile.model_size import (
    cache_itemsize,
    count_parameters,
    prefill_operations,
    token_cache_bytes,
    weight_bytes,
)
from kvc_trt.profile.planning.placement import on_one_gpu
from kvc_trt.profile.run import StepCosts

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    architecture, extra = FAMILIES[family]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**SMALL, **extra)
    with torch.device("meta"):
        expected = model_class(config).num_parameters()
    written = {**config.to_dict(), "architectures": [architecture]}
    assert count_parameters(parse_config(written, "config.json")).total == expected


@pytest.mark.parametrize(
    ("name", "billions"), [("llama3.1-8b", 8.030), ("llama3.1-70b", 70.554), ("qwen2.5-7b", 7.616)]
)
def test_parameters_of_presets_match_the_published_sizes(name, billions):
    assert count_parameters(load_preset(name).config).total / 1e9 == pytest.approx(billions, abs=0.0006)


def test_weight_bytes_of_llama_8b_match_known_values():
    model = load_preset("llama3.1-8b").config
    counts = count_parameters(model)
    assert (counts.linear, counts.lm_head, counts.embedding) == (6_979_321_856, 525_336_576, 525_336_576)
    found = weight_bytes(model, "bf16")
    assert found.per_step / 1e9 == pytest.approx(15.01, abs=0.005)
    assert found.resident / 1e9 == pytest.approx(16.06, abs=0.005)
    assert weight_bytes(model, "fp32").resident == 4 * counts.total
    assert token_cache_bytes(model, cache_itemsize("bf16")) * model.num_hidden_layers == 131_072


def test_quantised_matrices_carry_their_scales():
    model = load_preset("llama3.1-8b").config
    counts = count_parameters(model)
    matrices = counts.linear + counts.lm_head
    rest = counts.embedding + counts.embedding // 32 * 2 + 4 * counts.vectors
    assert weight_bytes(model, "int4").resident == matrices // 2 + matrices // 32 * 2 + rest
    assert weight_bytes(model, "int8").resident == matrices + matrices // 32 * 2 + rest


def test_a_tied_head_is_the_embedding_in_int8():
    model = replace(load_preset("llama3.1-8b").config, tie_word_embeddings=True)
    counts = count_parameters(model)
    assert counts.tied
    head = counts.embedding * 17 / 16
    linear = counts.linear * 9 / 16 + 4 * counts.vectors
    assert weight_bytes(model, "int4").resident == weight_bytes(model, "int4").per_step == linear + head


def test_prefill_operations_of_llama_8b_match_the_formula():
    """14 Gflop per token in matrices; attention at 32K adds 2 * 32 layers * 4096 * 32768^2."""
    model = load_preset("llama3.1-8b").config
    assert prefill_operations(model, 1) == pytest.approx(2 * 6_979_321_856, rel=1e-4)
    assert prefill_operations(model, 32768) == pytest.approx(2 * 6_979_321_856 * 2**15 + 2.0**48, rel=1e-6)


def test_a_token_needs_its_own_experts_and_everything_else():
    """Published: 46.7B parameters of which 12.9B are active; 30.5B and 3.3B."""
    for name, total, active in (("mixtral-8x7b", 46.7, 12.9), ("qwen3-30b-a3b", 30.5, 3.3)):
        counts = count_parameters(load_preset(name).config)
        assert (counts.total / 1e9, counts.active / 1e9) == pytest.approx((total, active), abs=0.06)


def test_a_step_reads_the_chosen_experts_and_a_batch_the_expected_number_of_distinct_ones():
    model = load_preset("mixtral-8x7b").config
    size, counts = weight_bytes(model, "bf16"), count_parameters(model)
    assert size.per_step == 2 * (counts.active - counts.embedding)
    assert size.resident == 2 * counts.total
    cost = size.step(0.0)
    assert cost.bytes(1) == pytest.approx(size.per_step)
    every = size.per_step - size.experts * 2 / 8
    assert cost.bytes(2) == pytest.approx(every + size.experts * (1 - (6 / 8) ** 2))
    assert cost.bytes(1000) == pytest.approx(every + size.experts)


def test_floors_of_batches_and_of_prompts_count_the_experts_of_all_their_tokens():
    model = load_preset("mixtral-8x7b").config
    size, gpu = weight_bytes(model, "bf16"), accelerator("H100")
    lengths = {"token_budget": None, "max_input_len": 64, "max_output_len": 16}
    parameters = policies.resolve("full", model=model, **lengths)
    measured = StepCosts(model, size, cache_itemsize("bf16")).of(SimpleNamespace(parameters=parameters), 64)
    planned = on_one_gpu(model, parameters, "bf16", turns=False)
    others = size.per_step - size.experts / 4
    four = others + size.experts * (1 - (6 / 8) ** 4)
    assert measured.bytes(4) - 4 * measured.row_bytes == pytest.approx(four)
    assert planned.sides["full"].step.weights_read(4) == pytest.approx(four)
    assert planned.prefill_seconds(gpu, 4) == pytest.approx(four / gpu.bandwidth)
