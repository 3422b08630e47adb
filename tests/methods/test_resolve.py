"""`resolve`: its derived numbers, its refusals, and properties over every budget."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from kvc_trt.errors import InputError
from kvc_trt.methods.base.rocketkv_budget import traffic
from kvc_trt.models.config import ModelConfig, RopeScaling
from kvc_trt.policies import PolicyParameters, applicable, available, describe, method, resolve

MODEL = ModelConfig(
    architecture="LlamaForCausalLM", dtype="float32", vocab_size=1000, hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_size=128, norm_epsilon=1e-5,
    rotary_base=500000.0, rotary_scaling=None, max_position_embeddings=200_000, tie_word_embeddings=False,
    qkv_bias=False, output_bias=False, qk_norm=False, sliding_window=None, bos_token_id=1, eos_token_ids=(2,),
)  # fmt: skip
LLAMA_3_1 = replace(MODEL, rotary_scaling=RopeScaling("llama3", 8.0))
LONGCHAT = replace(MODEL, rotary_scaling=RopeScaling("linear", 8.0), num_key_value_heads=32)
NAMES = [name for name, _, _ in available()]


def resolved(
    policy: str = "rocketkv", budget: int | None = 512, n: int = 32640, new: int = 128, **more: Any
) -> PolicyParameters:
    model = more.pop("model", MODEL)
    return resolve(policy, model=model, token_budget=budget, max_input_len=n, max_output_len=new, **more)


def test_full_needs_no_budget() -> None:
    found = resolved("full", None)
    assert (found.token_budget, found.capacity, found.top_k, found.dense_limit) == (32768,) * 4
    assert not found.is_compressed(0)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("budget", [512, 1024])
def test_a_conversation_has_the_positions_that_are_asked_for(policy: str, budget: int) -> None:
    scores = tuple((0.5,) * MODEL.num_key_value_heads for _ in range(MODEL.num_hidden_layers))
    more = {"head_scores": scores} if policy == "duo-attention" else {}
    found = resolved(policy, None if policy == "full" else budget, max_conversation_len=65536, **more)
    assert found.max_sequence_len == 65536
    assert resolved(policy, None if policy == "full" else budget, **more).max_sequence_len == 32768


def test_snapkv_and_hybrid_have_rocketkvs_numbers_of_their_stage() -> None:
    rocket, snap, pages = (resolved(policy) for policy in ("rocketkv", "snapkv++", "hybrid"))
    assert (snap.capacity, snap.prompt_budget, snap.pool_kernel) == (3191, 3063, rocket.pool_kernel)
    assert (snap.prompt_eviction, snap.decode_selection) == (rocket.prompt_eviction, "dense")
    assert (pages.prompt_eviction, pages.decode_selection) == ("none", rocket.decode_selection)
    assert (pages.capacity, pages.top_k, pages.prompt_budget) == (32768, 256, 32640)
    assert all(found.is_compressed(0) for found in (rocket, snap, pages))


@pytest.mark.parametrize("policy", ["rocketkv", "hybrid", "expected-attention-hybrid"])
def test_last_tokens_that_are_read_in_any_case_are_some_of_top_k(policy: str) -> None:
    found = [resolved(policy, **more).recent for more in ({}, {"recent": 0}, {"recent": 256})]
    assert found == [0, 0, 256]
    with pytest.raises(InputError, match="recent is 257; expected at most the 256 tokens that a step reads"):
        resolved(policy, recent=257)


@pytest.mark.parametrize("policy", ["tova", "h2o", "streaming-llm", "sliding-window"])
def test_a_policy_that_evicts_at_every_step_keeps_a_last_token(policy: str) -> None:
    with pytest.raises(InputError, match="recent is 0; expected an integer at least 1"):
        resolved(policy, recent=0)


def test_snapkv_spends_the_budget_on_eviction_alone() -> None:
    found = resolved("snapkv-gqa")
    assert (found.prompt_budget, found.capacity, found.pool_kernel) == (384, 512, 7)
    with pytest.raises(InputError, match=r"the prompt budget is 31 .* at least the observation window of 32"):
        resolved("snapkv-gqa", 159)


@pytest.mark.parametrize(
    ("model", "n", "kernel"),
    [
        (MODEL, 100_000, 63), (LLAMA_3_1, 47_999, 63), (LLAMA_3_1, 48_000, 511), (LONGCHAT, 11_999, 63),
        (LONGCHAT, 12_000, 511), (replace(LONGCHAT, num_key_value_heads=8), 12_000, 63),
    ],
)  # fmt: skip
def test_the_automatic_pool_kernel_depends_on_model_and_length(model: ModelConfig, n: int, kernel: int) -> None:
    assert resolved(model=model, n=n).pool_kernel == kernel
    assert resolved("rocketkv-v1", model=model, n=n, pool_kernel="auto").pool_kernel == kernel
    assert resolved("rocketkv-v2", model=model, n=n).pool_kernel == 63
    assert resolved("rocketkv-v2", model=model, n=n, pool_kernel=5).pool_kernel == 5


def test_overrides_move_what_is_derived_from_them() -> None:
    found = resolved(prompt_budget=1920, window=64, skip_layers=2)
    assert (found.capacity, found.page_size, found.top_r, found.window) == (2048, 2, 64, 64)
    assert [found.layer_capacity(layer) for layer in (0, 1, 2)] == [32768, 32768, 2048]
    assert resolved(page_size=1).top_r == 20  # one channel of a smaller page is more traffic, so fewer channels
    fixed = resolved(page_size=1, top_r=9, top_k=77, dense_until=1024)
    assert (fixed.page_size, fixed.top_r, fixed.top_k, fixed.dense_limit, fixed.selected_width) == (
        1,
        9,
        77,
        1024,
        1024,
    )
    assert resolved(dense_until="auto", pool_kernel=None) == resolved()


def test_a_prompt_that_fits_is_kept_whole() -> None:
    found = resolved(budget=4096, n=20, new=8)
    assert (found.capacity, found.prompt_budget, found.page_size, found.top_r) == (28, 20, 1, 128)
    assert resolved(prompt_budget=100_000).prompt_budget == 32640


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": 15}, "token_budget is 15; expected an integer at least 16"),
        ({"budget": None}, "policy rocketkv needs a token budget"),
        ({"budget": "512"}, "token_budget is '512'; expected tokens, or a percentage"),
        ({"budget": True}, "token_budget is True; expected an integer"),
        ({"n": 0}, "max_input_len is 0"),
        ({"n": 200_001}, "max_input_len is 200001, but the model.s max_position_embeddings is 200000"),
        ({"new": 0}, "max_output_len is 0"),
        ({"split": 1.5}, "split is 1.5; expected adaptive, even, or a number in 0..1"),
        ({"split": float("nan")}, "split is nan"),
        ({"split": "odd"}, "split is 'odd'"),
        ({"policy": "rocketkv-v1", "split": 0.3}, "rocketkv-v1 fixes the split to even, found 0.3"),
        ({"policy": "quest", "split": 0.3}, "policy quest has no split"),
        ({"policy": "rocketvk"}, "unknown policy 'rocketvk'; did you mean 'rocketkv'?"),
        ({"page_sise": 3}, "unknown policy override 'page_sise'; did you mean 'page_size'?"),
        ({"policy": "full", "page_size": 3}, "policy full has no page_size"),
        ({"policy": "snapkv++", "top_k": 3}, "policy snapkv\\+\\+ has no top_k"),
        ({"policy": "hybrid", "pool_kernel": 7}, "policy hybrid has no pool_kernel"),
        ({"pool_kernel": 8}, "pool_kernel is 8; expected an odd number"),
        ({"prompt_budget": 31}, "the prompt budget is 31"),
        ({"window": 0}, "window is 0"),
        ({"window": 4000}, "at least the observation window of 4000"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 40_000}, "page_size is 40000; expected an integer in 1..32768"),
        ({"top_r": 129}, r"top_r is 129; expected an integer in 1..128 \(the head size\)"),
        ({"top_k": 0}, "top_k is 0"),
        ({"dense_until": -1}, "dense_until is -1"),
        ({"skip_layers": 33}, "skip_layers is 33"),
        (
            {"model": replace(MODEL, sliding_window=4096), "n": 4000},
            "policy rocketkv compresses layers of full attention, and in LlamaForCausalLM 32 of 32 slide in sequences "
            "of 4128 tokens",
        ),
    ],
)
def test_inconsistent_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(**wrong)


def test_a_sliding_window_is_fine_as_long_as_it_covers_everything() -> None:
    assert resolved(model=replace(MODEL, sliding_window=4096), n=3968).max_sequence_len == 4096


SHAPES = st.tuples(
    st.integers(64, 5000), st.integers(1, 139_000), st.integers(1, 1000), st.sampled_from(["adaptive", "even"])
)


@given(SHAPES)
def test_a_step_reads_what_the_budget_says(shape: tuple[int, int, int, str]) -> None:
    """Never more than the budget; less by what two floors lose: half a token, and one channel of every page."""
    budget, n, new, split = shape
    assume(n + new >= 2 * budget)
    found = resolved_or_skip(budget, n, new, split)
    pairs = traffic(found.capacity, found.page_size, found.top_r, found.top_k, 128)
    assert pairs <= budget
    one_channel = found.capacity / found.page_size / (2 * 128)
    assert pairs >= budget - 0.5 - one_channel
    assert pairs >= 0.97 * budget


@given(SHAPES, st.integers(0, 3000))
def test_more_budget_never_keeps_less(shape: tuple[int, int, int, str], more: int) -> None:
    budget, n, new, split = shape
    small, large = resolved_or_skip(budget, n, new, split), resolved_or_skip(budget + more, n, new, split)
    assert small.capacity <= large.capacity
    assert small.top_k <= large.top_k
    assert large.capacity <= large.max_sequence_len
    assert large.capacity == large.prompt_budget + new


def resolved_or_skip(budget: int, n: int, new: int, split: str) -> PolicyParameters:
    try:
        return resolved("rocketkv", budget, n, new, split=split)
    except InputError as error:
        assume("observation window" not in error.message)
        raise


def test_every_policy_in_the_table_resolves_as_described() -> None:
    assert NAMES[:3] == ["full", "rocketkv", "rocketkv-v1"]
    for one in describe():
        found = resolved(one.name, 512)  # duo-attention: no retrieval head, and so no pattern
        assert found.policy == one.name
        assert (found.prompt_eviction, found.decode_selection) == (one.prompt_eviction, one.decode_selection)
        assert callable(method(found).compact)
        assert applicable(one.name, dict.fromkeys(one.overrides, 1) | {"nothing": 1}) == dict.fromkeys(one.overrides, 1)


def test_importing_policies_and_resolving_import_no_heavy_library() -> None:
    heavy = ("torch", "onnx", "onnxruntime", "transformers")
    program = f"""
import sys, kvc_trt.policies
print([name for name in {(*heavy, "numpy")} if name in sys.modules])
kvc_trt.policies.describe()
print([name for name in {heavy} if name in sys.modules])
"""
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n[]\n"
    )
