"""Prompt budgets of the SnapKV family: the accounting of RocketKV's appendix, and PyramidKV's division of it."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvc_trt.errors import InputError
from kvc_trt.methods.pyramidkv import layer_budgets
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import PolicyParameters, resolve

LLAMA, LONGCHAT = load_preset("llama3.1-8b").config, load_preset("longchat-7b-v1.5-32k").config


def resolved(policy: str, budget: int, new: int, model: Any = LLAMA) -> PolicyParameters:
    return resolve(policy, model=model, token_budget=budget, max_input_len=16384, max_output_len=new)


@pytest.mark.parametrize(("new", "kept"), [(128, 32), (50, 51), (32, 56)])
def test_snapkv_divides_the_budget_among_the_heads_of_a_group(new: int, kept: int) -> None:
    """Four query heads per KV head, budget 256; 32 tokens are the observation window and nothing else."""
    found = resolved("snapkv", 256, new)
    assert (found.prompt_budget, found.capacity, found.pool_kernel) == (kept, kept + new, 7)
    assert (found.prompt_eviction, found.per_query_head) == ("snapkv", True)
    assert resolved("snapkv-gqa", 256, new).prompt_budget == 256 - new


@pytest.mark.parametrize(("policy", "new"), [("snapkv", 129), ("snapkv", 256), ("snapkv-gqa", 225), ("pyramidkv", 300)])
def test_a_budget_without_room_for_the_window_is_not_applicable(policy: str, new: int) -> None:
    with pytest.raises(InputError, match="expected at least the observation window of 32"):
        resolved(policy, 256, new)


def test_without_groups_snapkv_keeps_as_much_as_with_them() -> None:
    assert resolved("snapkv", 256, 128, LONGCHAT).prompt_budget == resolved("snapkv-gqa", 256, 128).prompt_budget == 128


@pytest.mark.parametrize(
    ("mean", "window", "layers", "prompt", "budgets"),
    [
        (128, 32, 4, 4096, (220, 159, 98, 37)),  # 96 besides the window: 188 to 4, a step of 184 / 3
        (2048, 32, 3, 16384, (3964, 2048, 132)),
        (128, 32, 4, 200, (200, 152, 104, 56)),  # the first layer cannot keep more than the prompt, the last gets it
        (128, 32, 4, 192, (192, 150, 108, 66)),
        (128, 32, 4, 191, (128,) * 4),  # shorter than twice what is kept besides the window
        (120, 20, 5, 220, (215, 168, 121, 74, 27)),
        (128, 32, 1, 4096, (128,)),
    ],
)
def test_pyramid_budgets_match_hand_computed_values(
    mean: int, window: int, layers: int, prompt: int, budgets: tuple[int, ...]
) -> None:
    assert layer_budgets(mean, window, layers, prompt) == budgets


@given(st.integers(0, 5000), st.integers(1, 64), st.integers(2, 80), st.integers(0, 20_000))
def test_a_pyramid_falls_and_keeps_the_mean(free: int, window: int, layers: int, more: int) -> None:
    """A step rounded down falls short at the narrow end: half a token per layer and step, never below the mean."""
    budgets = layer_budgets(free + window, window, layers, free + window + more)
    assert list(budgets) == sorted(budgets, reverse=True)
    assert window <= budgets[-1]
    assert budgets[0] <= free + window + more
    surplus = sum(budgets) - layers * (free + window)
    assert 0 <= surplus <= layers * (layers - 2) / 2


def test_the_layers_of_an_engine_follow_the_pyramid() -> None:
    found = resolved("pyramidkv", 256, 128)
    assert found.layer_budgets == layer_budgets(128, 32, 32, 16384)
    assert [found.layer_capacity(layer) for layer in (0, 31)] == [found.layer_budgets[i] + 128 for i in (0, 31)]
