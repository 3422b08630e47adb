"""Token budgets in percent: SnapKV's share of each prompt by hand (eq. 3), and a share of the longest prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvc_trt.errors import InputError
from kvc_trt.methods.base.token_budget import budgets_by_share, share_of, tokens_of
from kvc_trt.policies import PolicyParameters, resolve
from tests.small_model import SMALL

SNAPKV = ("snapkv", "snapkv-gqa")


def resolved(policy: str, budget: int | str = "20%", longest: int = 232, **more: Any) -> PolicyParameters:
    numbers = {"max_input_len": longest, "max_output_len": 8, **more}
    return resolve(policy, model=SMALL, token_budget=budget, **numbers)


# p = 20 %, W = 32: 32 + floor((n - 32) / 5).
@pytest.mark.parametrize(("n", "kept"), [(1, 1), (32, 32), (36, 32), (37, 33), (42, 34), (100, 45), (232, 72)])
@pytest.mark.parametrize("policy", SNAPKV)
def test_a_prompt_keeps_its_share_beside_the_window(policy: str, n: int, kept: int) -> None:
    found = resolved(policy)
    assert found.kept_of(n) == kept
    assert (found.by_length, found.prompt_share, found.longest_whole) == (True, 0.2, 32)
    assert (found.prompt_budget, found.capacity, found.token_budget) == (72, 80, 46)
    assert found.kept_after(n) == kept
    assert found.kept_after(10_000) == 72


@settings(max_examples=60)
@given(st.integers(1, 400), st.decimals(1, 100, places=2), st.integers(1, 64))
def test_shares_are_exact_and_rise(longest: int, percent: Any, window: int) -> None:
    """In exact arithmetic, of the percentage as it is written."""
    share = share_of(f"{percent}%")
    assert share is not None
    kept = budgets_by_share(longest, share, window)
    exact = [n if n <= window else window + int((n - window) * percent / 100) for n in range(longest + 1)]
    assert kept.tolist() == exact
    assert tokens_of(f"{percent}%", longest) == int(longest * percent / 100)


@pytest.mark.parametrize("policy", ["streaming-llm", "h2o", "tova", "quest", "rocketkv-v1", "pyramidkv", "keydiff"])
def test_other_policies_take_a_share_of_the_longest_prompt(policy: str) -> None:
    changes = {"pyramidkv": {"window": 8}}.get(policy, {})
    assert resolved(policy, **changes) == resolved(policy, 46, **changes)  # 20 % of 232
    assert resolved(policy, "29%", 100 + 100, **changes).token_budget == 58


def test_full_needs_no_budget_and_takes_none() -> None:
    assert resolved("full") == resolved("full", 46)


@pytest.mark.parametrize(
    ("more", "budget"), [({"prompt_budget": 50}, 50), ({"layer_budget": "squeeze"}, 72)], ids=["by hand", "by layers"]
)
def test_one_number_for_all_prompts_replaces_the_share(more: dict[str, Any], budget: int) -> None:
    found = resolved("snapkv-gqa", **more)
    assert (found.by_length, found.prompt_share, found.prompt_budget) == (False, 0.0, budget)


def test_the_whole_prompt_is_a_share_too() -> None:
    found = resolved("snapkv-gqa", "100%")
    assert [found.kept_of(n) for n in (1, 33, 232)] == [1, 33, 232]


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "20", "%", "2e1%", "20%\n", "0.0%", "1000%"])
def test_other_percentages_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected tokens, or a percentage over 0% to 100%"):
        resolved("snapkv", text)


def test_fewer_tokens_than_any_budget_has_are_refused() -> None:
    with pytest.raises(InputError, match=r"token_budget is 5% of the longest prompt's 232 tokens, 11; .*at least 16"):
        resolved("streaming-llm", "5%")


def test_recorded_numbers_that_no_policy_derives_are_refused() -> None:
    with pytest.raises(InputError, match=r"prompt_share is 0\.2 without by_length"):
        replace(resolved("snapkv"), by_length=False).check(SMALL)
