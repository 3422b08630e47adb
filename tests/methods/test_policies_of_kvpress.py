"""TOVA, KeyDiff and Expected Attention: their numbers, and their refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvc_trt.cli.text.policy import describe_parameters
from kvc_trt.errors import InputError
from kvc_trt.graph.state import state_tensors
from kvc_trt.methods.base.layer_budget import smallest_budget
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import PolicyParameters, resolve

MODEL = load_preset("llama3.1-8b").config
AHEAD = ("expected-attention", "expected-attention-hybrid")


def resolved(policy: str, budget: int = 512, n: int = 32640, new: int = 128, **more: Any) -> PolicyParameters:
    return resolve(policy, model=MODEL, token_budget=budget, max_input_len=n, max_output_len=new, **more)


def test_the_hybrid_form_is_rocketkv_with_another_first_stage() -> None:
    """Where it keeps all prompts alike, every number is RocketKV's, except those of its observation window."""
    ours, rocketkv = resolved("expected-attention-hybrid"), resolved("rocketkv", by_length=False)
    assert (ours.prompt_eviction, ours.decode_selection) == ("expected-attention", "hybrid")
    assert (ours.sinks, ours.future_positions, ours.window, ours.pool_kernel) == (4, 512, 32640, 1)
    same = {"policy", "prompt_eviction", "sinks", "future_positions", "window", "pool_kernel"}
    assert replace(ours, **{name: getattr(rocketkv, name) for name in same}) == rocketkv


@pytest.mark.parametrize("policy", ["keydiff", "expected-attention"])
def test_the_budget_less_the_answer_is_kept_of_a_prompt(policy: str) -> None:
    found = resolved(policy)
    assert (found.prompt_budget, found.capacity, found.decode_selection) == (384, 512, "dense")
    assert resolved(policy, prompt_budget=100).capacity == 228
    assert resolved(policy, 4096, n=500).prompt_budget == 500


def test_tova_holds_one_slot_more_than_its_budget_and_a_position_for_each() -> None:
    found = resolved("tova", 256)
    assert (found.capacity, found.prompt_budget, found.recent, found.window) == (257, 256, 1, 1)
    assert resolved("tova", 256, recent=100).recent == 100
    assert resolved("tova", 4096, 100, 28).capacity == 129
    state = state_tensors(MODEL, found, "float16")
    per_slot = sum(tensor.bytes_per_row() for tensor in state) / (257 * 8 * 32)
    assert per_slot == 2 * 2 * 128 + 4


def test_settings_reach_the_parameters() -> None:
    found = resolved("expected-attention", sinks=0, future_positions=64, skip_layers=2)
    assert (found.sinks, found.future_positions, found.skip_layers) == (0, 64, 2)
    skipped, others = (found.groups(layer)[0].parameters for layer in (1, 2))
    assert (skipped.policy, skipped.future_positions) == ("full", 0)
    assert (others.sinks, others.future_positions) == (0, 64)
    paged = resolved("expected-attention-hybrid", page_size=8, top_k=100, split="even")
    assert (paged.page_size, paged.top_k, paged.split) == (8, 100, "even")


@pytest.mark.parametrize(
    ("policy", "budget", "settings", "message"),
    [
        ("tova", 64, {"recent": 65}, "the token budget is 64; expected at least the 65 recent tokens"),
        ("tova", 64, {"sinks": 4}, "policy tova has no sinks"),
        ("keydiff", 128, {}, r"the prompt budget is 0 tokens \(token budget 128, new 128\); expected at least 1$"),
        ("keydiff", 256, {"future_positions": 9}, "policy keydiff has no future_positions"),
        ("expected-attention", 132, {}, r"prompt budget is 4 tokens .* at least 5: 4 sinks and one other"),
        ("expected-attention", 512, {"sinks": 384}, "expected at least 385: 384 sinks and one other"),
        ("expected-attention", 512, {"future_positions": 0}, "future_positions is 0; expected an integer at least 1"),
        ("expected-attention", 512, {"window": 32}, "policy expected-attention has no window"),
        ("rocketkv", 512, {"future_positions": 64}, "policy rocketkv has no future_positions"),
    ],
)
def test_impossible_settings_are_refused(policy: str, budget: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(policy, budget, **settings)


def test_a_prompt_as_short_as_the_sinks_can_be_served() -> None:
    found = resolved("expected-attention", 512, n=3)
    assert (found.prompt_budget, found.sinks) == (3, 2)


@pytest.mark.parametrize(("policy", "least"), [("keydiff", 1), ("expected-attention", 5), ("tova", 1)])
def test_layers_may_have_budgets_of_their_own(policy: str, least: int) -> None:
    """A layer's least budget is the part that its eviction protects, not a window that it does not use."""
    assert smallest_budget(resolved(policy)) == least
    budgets = [least, *[2 * 384 - least] * 31]
    found = resolved(policy, layer_budget="squeeze", layer_budgets=budgets)
    spare = 1 if policy == "tova" else 128
    assert [found.layer_capacity(layer) for layer in (0, 1)] == [least + spare, 2 * 384 - least + spare]
    if policy == "tova":
        assert resolved(policy, layer_budget="squeeze-online").layer_capacity(0) == 2 * 512 + 1
        return
    with pytest.raises(InputError, match="squeeze-online"):
        resolved(policy, layer_budget="squeeze-online")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("keydiff", "384 prompt tokens kept of each KV head, 512 slots (those of the most distinct keys)"),
        (
            "expected-attention",
            "384 prompt tokens kept of each KV head, 512 slots (4 first; queries expected 512 positions ahead)",
        ),
        ("tova", "512 tokens kept of each KV head while it answers (1 last, 511 most attended), 513 slots"),
        ("snapkv-gqa", "384 prompt tokens kept of each KV head, 512 slots (window 32, pool kernel 7)"),
    ],
)
def test_one_line_describes_the_kept_tokens(policy: str, words: str) -> None:
    assert words in describe_parameters(resolved(policy))
