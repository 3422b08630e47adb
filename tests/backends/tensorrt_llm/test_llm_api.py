"""RocketKV in TensorRT-LLM's units: every preset and budget, refusals, and the text that says it."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt import policies
from kvc_trt.backends.tensorrt_llm.llm_api import (
    LlmApiConfiguration,
    RocketSparseAttention,
    export_llm_api,
    nearest_page_size,
)
from kvc_trt.backends.tensorrt_llm.llm_api_file import parse, yaml_text
from kvc_trt.errors import InputError
from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.validation import validated

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
FIELDS = {
    "algorithm", "window_size", "kernel_size", "prompt_budget", "page_size", "topk", "topr", "kt_cache_dtype",
}  # fmt: skip
LLAMA = load_preset("llama3.1-8b").config


def _parameters(policy="rocketkv", model=LLAMA, token_budget=512, max_input_len=32640, max_output_len=128, **overrides):
    return policies.resolve(
        policy, model=model, token_budget=token_budget, max_input_len=max_input_len, max_output_len=max_output_len,
        **overrides,
    )  # fmt: skip


def _export(parameters, model=LLAMA, **options):
    return export_llm_api(model, parameters, max_batch_size=8, **options)


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rocketkv", "rocketkv-v1", "rocketkv-v2", "hybrid"])
@pytest.mark.parametrize("preset", list_presets())
def test_exports_of_every_preset_and_budget_are_consistent(preset, policy):
    for budget in BUDGETS:
        _check_budget(load_preset(preset), policy, budget)


def _check_budget(loaded, policy, budget):
    defaults = loaded.defaults
    parameters = _parameters(
        policy, loaded.config, budget, defaults.get("max_input_len", 3968), defaults.get("max_output_len", 128)
    )
    for attention in ("TRTLLM", "VANILLA"):
        _check_export(loaded.config, parameters, _export(parameters, loaded.config, attention=attention))


def _check_export(model, parameters, export):
    text = yaml_text(export, source="SOURCE", model="MODEL")
    assert parse(text) == export.configuration
    assert all(len(line) <= 120 for line in text.splitlines())
    rocket = export.configuration.sparse_attention_config
    assert set(rocket.model_dump()) == FIELDS
    assert rocket.page_size & (rocket.page_size - 1) == 0
    assert rocket.page_size <= 32
    assert 1 <= rocket.topr <= model.head_size
    assert (rocket.prompt_budget > parameters.max_input_len) == (parameters.prompt_eviction == "none")
    assert export.configuration.max_num_tokens >= parameters.max_input_len
    # Never more than the policy reads, beyond the rounding of k to whole pages.
    assert export.traffic.theirs <= export.traffic.ours + rocket.page_size / 2 + 1
    if rocket.page_size == parameters.page_size:
        assert rocket.topr == parameters.top_r


def test_the_export_equals_the_documented_example():
    export = _export(_parameters())
    assert export.configuration.model_dump() == {
        "backend": "pytorch",
        "attn_backend": "TRTLLM",
        "sparse_attention_config": {
            "algorithm": "rocket", "window_size": 32, "kernel_size": 63, "prompt_budget": 3063, "page_size": 4,
            "topk": 64, "topr": 81, "kt_cache_dtype": "bfloat16",
        },
        "kv_cache_config": {"enable_block_reuse": False},
        "enable_chunked_prefill": False,
        "max_batch_size": 8,
        "max_seq_len": 32768,
        "max_num_tokens": 32640,
    }  # fmt: skip
    assert export.traffic.ours == pytest.approx(509.5, abs=0.1)
    assert export.traffic.theirs == pytest.approx(508.4, abs=0.1)
    # 798 pages with both bounds of 128 channels in bfloat16 are 798 pairs; 64 blocks of 32 tokens are 2048.
    assert export.traffic.at_most == 798 + 2048


def test_topk_counts_pages_in_trtllm_and_tokens_in_vanilla():
    assert _export(_parameters()).configuration.sparse_attention_config.topk == 64
    vanilla = _export(_parameters(), attention="VANILLA")
    assert vanilla.configuration.sparse_attention_config.topk == 256
    assert vanilla.traffic.at_most is None
    assert not any("pages" in change for change in vanilla.changes if change.startswith("topk"))


@given(st.integers(1, 200))
def test_the_nearest_page_is_a_power_of_two_near_in_ratio(page_size):
    nearest = nearest_page_size(page_size)
    others = [2**power for power in range(6)]
    assert nearest in others
    distance = {other: abs(math.log2(other / page_size)) for other in others}
    assert distance[nearest] <= min(distance.values()) + 1e-12


@given(page=st.integers(1, 40), channels=st.integers(1, 128), tokens=st.integers(1, 4096))
def test_scoring_never_reads_more_for_another_page_size(page, channels, tokens):
    parameters = _parameters(page_size=page, top_r=channels, top_k=tokens)
    rocket = _export(parameters).configuration.sparse_attention_config
    assert rocket.topr / rocket.page_size <= max(channels / page, 1 / rocket.page_size)
    assert abs(rocket.topk * rocket.page_size - tokens) <= max(rocket.page_size / 2, rocket.page_size - tokens)


@pytest.mark.parametrize(
    ("policy", "overrides", "message", "hint"),
    [
        ("full", {}, "compresses nothing", "leave sparse_attention_config out"),
        ("snapkv++", {}, "attends to all that it kept", "--backend tensorrt"),
        ("snapkv-gqa", {}, "attends to all that it kept", "export policy rocketkv"),
        ("rocketkv", {"skip_layers": 2}, "first 2 layers", "skip_layers: 0"),
        ("hybrid", {"skip_layers": 1}, "first 1 layers", "skip_layers: 0"),
        ("rocketkv", {"pool_kind": "avg"}, "pool_kind is avg; TensorRT-LLM's RocketKV pools by max", "pool_kind=max"),
        ("rocketkv", {"recent": 4}, "recent is 4; TensorRT-LLM's RocketKV ranks the last tokens", "--set recent=0"),
    ],
)
def test_policies_that_the_llm_api_cannot_express_are_refused_with_a_way_out(policy, overrides, message, hint):
    with pytest.raises(InputError, match=message) as caught:
        _export(_parameters(policy, **overrides))
    assert hint in caught.value.hint


def test_another_eviction_is_refused_by_name():
    parameters = dataclasses.replace(_parameters(), policy="streaming", prompt_eviction="recent")
    with pytest.raises(InputError, match="evicts by recent"):
        _export(parameters)


def test_vanilla_attention_has_no_8_bit_bounds():
    with pytest.raises(InputError, match="bfloat16, found float8_e5m2"):
        _export(_parameters(), attention="VANILLA", kt_cache_dtype="float8_e5m2")
    eight = _export(_parameters(), kt_cache_dtype="float8_e5m2")
    assert any("8-bit" in line for line in eight.differences)
    assert eight.traffic.at_most == 399 + 2048


def test_limits_and_differences_stand_in_the_file():
    text = " ".join(yaml_text(_export(_parameters()), source="S", model="M").replace("#", " ").split())
    for part in (
        "compute capability 10.0", "no H100", "no block reuse", "no chunked prefill", "a power of two", "prototype",
        "over the tokens before the window alone", "temperature sqrt(head size)", "whole cache blocks",
        "TensorRT-LLM was not run", "attended densely by the policy", "64 pages (256 tokens)",
    ):  # fmt: skip
        assert part in text


def test_hybrid_evicts_nothing_and_says_so():
    export = _export(_parameters("hybrid"))
    assert not any(line.startswith("eviction") for line in export.differences)
    assert any("nothing is evicted" in change for change in export.changes)


def test_likely_trouble_is_a_warning():
    tiny = load_preset("retrieval-tiny").config
    parameters = _parameters(model=tiny, token_budget=64, max_input_len=2048, max_output_len=64)
    warnings = " ".join(_export(parameters, tiny).warnings)
    assert "head size 32" in warnings
    assert "float32" in warnings
    assert any("page size 8" in line for line in _export(_parameters("hybrid")).warnings)
    assert _export(_parameters()).warnings == ()


@pytest.mark.parametrize("text", ["a\nbackend: evil", "a\r\nbackend: evil", "a\x85backend: evil", "a\u2028b", "# \x00"])
def test_no_text_escapes_from_a_yaml_comment(text):
    export = _export(_parameters())
    assert parse(yaml_text(export, source=text, model=text)) == export.configuration


GOOD = {
    "window_size": 32, "kernel_size": 63, "prompt_budget": 2048, "page_size": 4, "topk": 64, "topr": 128,
    "kt_cache_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 3}, "power of two"),
        ({"kernel_size": 62}, "odd number"),
        ({"topk": 0}, "greater than or equal to 1"),
        ({"topr": "128"}, "valid integer"),
        ({"algorithm": "dsa"}, "'rocket'"),
        ({"kt_cache_dtype": "fp8"}, "float8_e5m2"),
        ({"topk_pages": 64}, "unknown key 'topk_pages'"),
    ],
)
def test_the_schema_is_strict(change, message):
    with pytest.raises(InputError, match=message):
        validated(RocketSparseAttention, {**GOOD, **change}, "test")


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_config": {"enable_block_reuse": True}},
        {"enable_chunked_prefill": True},
        {"backend": "tensorrt"},
        {"attn_backend": "FLASHINFER"},
        {"free_gpu_memory_fraction": 0.9},
    ],
)
def test_settings_forced_by_rocketkv_cannot_be_changed(change):
    good = _export(_parameters()).configuration.model_dump()
    validated(LlmApiConfiguration, good, "test")
    with pytest.raises(InputError):
        validated(LlmApiConfiguration, {**good, **change}, "test")
