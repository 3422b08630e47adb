"""Budgets of the policies that drop a token for each that they append."""

from __future__ import annotations

from typing import Any

import pytest

from kvc_trt.errors import InputError
from kvc_trt.graph.state import state_tensors
from kvc_trt.methods.base.layer_budget import uniform_budget
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import PolicyParameters, resolve

MODEL = load_preset("llama3.1-8b").config


def resolved(policy: str, budget: int = 256, n: int = 32640, new: int = 128, **more: Any) -> PolicyParameters:
    return resolve(policy, model=MODEL, token_budget=budget, max_input_len=n, max_output_len=new, **more)


@pytest.mark.parametrize(
    ("policy", "settings", "numbers"),
    [
        ("streaming-llm", {}, (256, 4, 252)),
        ("streaming-llm", {"sinks": 0}, (256, 0, 256)),
        ("streaming-llm", {"sinks": 128}, (256, 128, 128)),
        ("streaming-llm", {"recent": 100}, (104, 4, 100)),
        ("sliding-window", {}, (256, 0, 256)),
        ("h2o", {}, (257, 0, 128)),
        ("h2o", {"recent": 200}, (257, 0, 200)),
    ],
)
def test_capacity_sinks_and_recent_tokens_follow_from_the_settings(
    policy: str, settings: dict[str, int], numbers: tuple[int, int, int]
) -> None:
    found = resolved(policy, **settings)
    assert (found.capacity, found.sinks, found.recent) == numbers
    assert found.evicts_while_decoding
    assert found.prompt_budget == found.capacity - found.spare_slots
    assert found.dense_limit == found.top_k == found.capacity


def test_an_odd_budget_gives_the_recent_tokens_one_more() -> None:
    assert resolved("h2o", 255).recent == 128


def test_the_longest_sequence_bounds_the_slots() -> None:
    assert [resolved(policy, 4096, 100, 28).capacity for policy in ("streaming-llm", "sliding-window", "h2o")] == [
        128, 128, 129
    ]  # fmt: skip
    assert resolved("streaming-llm", 4096, 100, 28, sinks=300).sinks == 127


@pytest.mark.parametrize(
    ("policy", "budget", "settings", "message"),
    [
        (
            "streaming-llm",
            16,
            {"sinks": 16},
            r"the token budget is 16; expected at least 17: 16 sinks and 1 recent token$",
        ),
        ("streaming-llm", 64, {"recent": 61}, r"expected at least 65: 4 sinks and 61 recent tokens"),
        ("sliding-window", 64, {"recent": 65}, r"expected at least 65: 0 sinks and 65 recent tokens"),
        ("sliding-window", 64, {"sinks": 4}, r"policy sliding-window has no sinks"),
        ("h2o", 64, {"recent": 65}, r"the token budget is 64; expected at least the 65 recent tokens"),
        ("h2o", 64, {"positions": "cache"}, r"policy h2o has no positions"),
        ("streaming-llm", 64, {"positions": "slots"}, r"positions is 'slots'; expected one of original, cache"),
    ],
)
def test_impossible_settings_are_refused(policy: str, budget: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(policy, budget, **settings)


@pytest.mark.parametrize(("policy", "per_slot"), [("streaming-llm", 0), ("sliding-window", 0), ("h2o", 8)])
@pytest.mark.parametrize("new", [128, 90_000])
def test_the_bytes_of_a_row_do_not_depend_on_the_answer(policy: str, per_slot: int, new: int) -> None:
    """Per slot and KV head a key and a value in half precision, of H2O a sum and a position beside them."""
    state = state_tensors(MODEL, resolved(policy, n=32640, new=new), "float16")
    slots = 257 if policy == "h2o" else 256
    assert sum(tensor.bytes_per_row() for tensor in state) == 32 * 8 * slots * (2 * 128 * 2 + per_slot)


@pytest.mark.parametrize(("policy", "recent"), [("streaming-llm", (596, 36, 252)), ("h2o", (300, 20, 128))])
def test_a_layer_of_another_budget_keeps_that_much_of_a_prompt(policy: str, recent: tuple[int, ...]) -> None:
    budgets = (600, 40, 256, *(256,) * 29)
    found = resolved(policy, layer_budget="squeeze", layer_budgets=budgets)
    layers = [found.groups(layer)[0].parameters for layer in range(3)]
    assert [rule.prompt_budget for rule in layers] == [600, 40, 256]
    assert [rule.capacity - rule.spare_slots for rule in layers] == [600, 40, 256]
    assert tuple(rule.recent for rule in layers) == recent


@pytest.mark.parametrize(
    ("settings", "budget"), [({}, 256), ({"recent": 100}, 104), ({"budget": 4096, "n": 100, "new": 28}, 128)]
)
def test_divided_budgets_add_up_to_the_cache(settings: dict[str, int], budget: int) -> None:
    """A larger token budget does not count: layers divide the sinks and recent tokens in force, at most a sequence."""
    assert uniform_budget(resolved("streaming-llm", **settings)) == budget
    assert uniform_budget(resolved("h2o")) == 256
