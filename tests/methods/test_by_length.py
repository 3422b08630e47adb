"""RocketKV by a prompt's own length: numbers of the paper's rule by hand, and what holds at every length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvc_trt.errors import InputError
from kvc_trt.methods.base.rocketkv_budget import budgets_by_length, cache_capacity
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import PolicyParameters, resolve

LLAMA, LONGCHAT = (load_preset(name).config for name in ("llama3.1-8b", "longchat-7b-v1.5-32k"))
FAMILY = ("rocketkv", "rocketkv-v1", "rocketkv-v2", "rocketkv-mt", "snapkv++")


def resolved(policy: str = "rocketkv", budget: int = 512, n: int = 131_072 - 128, new: int = 128, **more: Any) -> Any:
    model = more.pop("model", LLAMA)
    settings_of = {"by_length": True, **more}
    return resolve(policy, model=model, token_budget=budget, max_input_len=n, max_output_len=new, **settings_of)


# S = n + 128, t = 512. Even: floor(sqrt(512 S)) - 128. Adaptive: c = S/512, a = 0.2 + 0.06 log2 c, floor(S/c^a) - 128.
@pytest.mark.parametrize(
    ("n", "even", "adaptive"),
    [
        (512, 512, 512),  # a prompt within the budget stays whole
        (513, 444, 482),  # S = 641: sqrt(328192) = 572.9; c = 1.252, a = 0.2195, 641 / 1.0506 = 610.1
        (3968, 1320, 1730),  # S = 4096: sqrt(2097152) = 1448.2; c = 8, a = 0.38, 4096 / 2.2038 = 1858.6
        (16_000, 2745, 2759),  # S = 16128: sqrt(8257536) = 2873.6; c = 31.5, a = 0.4986, 16128 / 5.5862 = 2887.1
        (16_256, 2768, 2768),  # S = 16384: c = 32, a = 0.5 in both
        (32_640, 3968, 3063),  # S = 32768: c = 64, a = 0.56, 32768 / 10.267 = 3191.6
        (130_944, 8064, 2891),  # S = 131072: c = 256, a = 0.68, 131072 / 43.411 = 3019.3
    ],
)
def test_budgets_match_hand_computed_values(n: int, even: int, adaptive: int) -> None:
    assert resolved("rocketkv-v1").kept_of(n) == even
    assert resolved("rocketkv").kept_of(n) == resolved("snapkv++").kept_of(n) == adaptive


@pytest.mark.parametrize("split", ["adaptive", "even", 0.25])
@pytest.mark.parametrize(("budget", "new"), [(512, 128), (64, 1), (100, 300)])
def test_budgets_of_all_lengths_are_those_of_the_rule_one_by_one(split: Any, budget: int, new: int) -> None:
    window, longest = 32, 4000
    found = budgets_by_length(longest, budget, new, split, window)
    assert found.shape == (longest + 1,)
    for n in range(longest + 1):
        own = cache_capacity(n + new, budget, new, split) - new
        assert found[n] == (n if n <= budget else min(max(own, window), n))


def test_capacity_is_that_of_the_prompt_that_keeps_most() -> None:
    """Prompts of 48,882 tokens keep most; those of the longest length 231 less."""
    found = resolved()
    assert (found.prompt_budget, found.capacity) == (3122, 3250)
    assert found.kept_of(48_882) == found.kept_of(48_896) == 3122
    assert resolved(n=131_072 - 128, by_length=False).prompt_budget == 2891
    assert (found.page_size, found.top_r, found.top_k) == (3, 60, 256)  # c2 = 3250 / 512, r = floor(384 / 6.348)


@pytest.mark.parametrize(
    ("model", "threshold"), [(LLAMA, 48_000), (LONGCHAT, 12_000), (replace(LLAMA, rotary_scaling=None), None)]
)
def test_the_pool_kernel_follows_the_prompt(model: Any, threshold: int | None) -> None:
    longest = min(model.max_position_embeddings, 131_072) - 128
    found = resolved(model=model, n=longest)
    assert found.pool_kernel_of(1) == found.pool_kernel_of((threshold or longest) - 1) == 63
    assert found.pool_kernel_of(longest) == (63 if threshold is None else 511)
    if threshold is not None:
        assert found.pool_kernel_of(threshold) == 511
        short = resolved(model=model, n=threshold - 1)
        assert (short.pool_kernel, short.long_prompt, short.short_pool_kernel) == (63, 0, 0)


@pytest.mark.parametrize("policy", ["rocketkv-v2", "rocketkv"])
def test_a_kernel_that_is_given_holds_for_every_prompt(policy: str) -> None:
    found = resolved(policy, **({} if policy == "rocketkv-v2" else {"pool_kernel": 7}))
    assert {found.pool_kernel_of(n) for n in (1, 47_999, 48_000, 130_944)} == {found.pool_kernel}


@given(
    st.sampled_from(FAMILY), st.integers(64, 600), st.integers(1, 3000), st.integers(1, 700), st.integers(1, 64)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_budgets_keep_their_invariants_at_every_length(
    policy: str, budget: int, longest: int, new: int, window: int
) -> None:
    try:
        found: PolicyParameters = resolved(policy, budget, longest, new, window=window)
    except InputError as error:
        assert "observation window" in str(error)  # noqa: PT017
        return
    kept = found.budgets.tolist()
    assert len(kept) == longest + 1
    assert found.capacity == max(kept) + new
    assert all(kept[n] == n for n in range(min(budget, longest) + 1))
    assert all(kept[n] <= n and kept[n] >= min(n, window) for n in range(longest + 1))
    assert found.longest_whole == max(n for n in range(longest + 1) if kept[: n + 1] == list(range(n + 1)))
    for n in range(budget + 1, longest + 1, max(1, longest // 20)):
        rule = cache_capacity(n + new, budget, new, found.split) - new
        assert kept[n] == max(rule, min(window, n))
    after = found.budgets_of_turns.tolist()
    assert after == [max(kept[: n + 1]) for n in range(longest + 1)]
    assert found.kept_after(10 * longest) == found.prompt_budget


def test_an_integer_quotient_is_that_integer() -> None:
    """sqrt(242 x 50) = 110, though the last bit of pow makes it less on some machines."""
    assert cache_capacity(242, 50, 1, "even") == 110


@pytest.mark.parametrize("policy", FAMILY)
def test_a_longer_conversation_does_not_compress_prompts_more(policy: str) -> None:
    short, long = resolved(policy, n=8000), resolved(policy, n=8000, max_conversation_len=60_000)
    assert short.prompt_budget == long.prompt_budget
    assert short.budgets.tolist() == long.budgets.tolist()


@pytest.mark.parametrize(
    "more", [{"prompt_budget": 1024}, {"layer_budget": "squeeze"}, {"layer_budget": "squeeze-online"}]
)
def test_settings_of_one_budget_for_all_prompts_exclude_by_length(more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="by_length derives the prompt budget from each prompt's length"):
        resolved(**more)
    assert not resolved(**more, by_length=None).by_length


def test_policies_without_by_length_refuse_it() -> None:
    with pytest.raises(InputError, match="policy snapkv-gqa has no by_length"):
        resolved("snapkv-gqa")


def test_rows_and_layers_that_are_not_compressed_have_no_lengths() -> None:
    found = resolved(skip_layers=1)
    assert [found.groups(layer)[0].parameters.by_length for layer in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"short_pool_kernel": 513}, "at most the pool_kernel of 511"),
        ({"short_pool_kernel": 0}, "short_pool_kernel is 0, long_prompt 48000; expected both or neither"),
        ({"max_input_len": 2**20 + 1}, "max_input_len is 1048577; expected at most 1048576 by length"),
    ],
)
def test_recorded_numbers_that_nothing_derives_are_refused(wrong: dict[str, int], message: str) -> None:
    found = resolved()
    found.check(LLAMA)
    with pytest.raises(InputError, match=message):
        replace(found, **wrong).check(LLAMA)
