"""Quest and SparQ divide a token budget."""

from __future__ import annotations

from typing import Any

import pytest

from kvc_trt.errors import InputError
from kvc_trt.methods.base.rocketkv_budget import traffic
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import PolicyParameters, resolve

MODEL = load_preset("llama3.1-8b").config
BUDGETS = (256, 512, 1024, 2048, 4096)


def resolved(policy: str, sequence: int, budget: int, **more: Any) -> PolicyParameters:
    return resolve(
        policy, model=MODEL, token_budget=budget, max_input_len=sequence - 128, max_output_len=128, **more
    )  # fmt: skip


def test_quest_reads_whole_pages_of_sixteen_in_all_but_two_layers() -> None:
    found = resolved("quest", 32768, 520)
    assert (found.page_size, found.top_k, found.dense_limit, found.selected_width) == (16, 512, 520, 520)
    assert (found.skip_layers, found.capacity, found.per_query_head) == (2, 32768, True)
    assert [found.is_compressed(layer) for layer in (0, 1, 2)] == [False, False, True]
    changed = resolved("quest", 32768, 520, page_size=64, top_k=200, skip_layers=0, dense_until=700)
    assert (changed.top_k, changed.skip_layers, changed.dense_limit) == (192, 0, 700)


@pytest.mark.parametrize(("sequence", "pages"), [(32768, [128, 64, 32, 16, 8]), (96000, [375, 188, 94, 47, 24])])
def test_a_matched_quest_spends_half_of_the_budget_on_bounds(sequence: int, pages: list[int]) -> None:
    found = [resolved("quest-matched", sequence, budget) for budget in BUDGETS]
    assert [one.page_size for one in found] == pages
    assert {(one.top_r, one.decode_selection, one.skip_layers) for one in found} == {(128, "hybrid", 0)}
    assert [one.top_k for one in found] == [budget // 2 for budget in BUDGETS]
    for one in found:
        pairs = traffic(one.capacity, one.page_size, one.top_r, one.top_k, 128)
        assert 0.975 * one.token_budget <= pairs <= one.token_budget


@pytest.mark.parametrize(
    ("sequence", "channels"), [(16384, [2, 4, 8, 16, 32]), (96000, [1, 1, 1, 3, 5]), (131072, [1, 1, 1, 2, 4])]
)
def test_sparq_rounds_to_the_nearest_channel(sequence: int, channels: list[int]) -> None:
    found = [resolved("sparq", sequence, budget) for budget in BUDGETS]
    assert [one.top_r for one in found] == channels
    assert [one.top_k for one in found] == [budget // 2 for budget in BUDGETS]
    assert [one.selected_width for one in found] == list(BUDGETS)
    assert all(one.reallocate and one.capacity == sequence for one in found)


def test_sparq_can_be_changed_number_by_number() -> None:
    found = resolved("sparq", 32768, 512, top_r=7, top_k=900, dense_until=600, reallocate=False, skip_layers=1)
    assert (found.top_r, found.top_k, found.dense_limit, found.selected_width) == (7, 900, 600, 901)
    assert not found.reallocate
    assert resolved("sparq", 400, 512).top_r == 128


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        ("quest", {"page_size": 600}, "whole pages of 600 tokens; expected a budget of at least one page, found 512"),
        ("quest", {"top_k": 15}, "whole pages of 16 tokens; expected a budget of at least one page, found 15"),
        ("quest", {"top_r": 5}, "policy quest has no top_r"),
        ("quest-matched", {"top_r": 5}, "policy quest-matched has no top_r"),
        ("sparq", {"page_size": 4}, "policy sparq has no page_size"),
        ("sparq", {"reallocate": "perhaps"}, "reallocate is 'perhaps'; expected one of True, False"),
    ],
)
def test_inconsistent_constants_are_refused(policy: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(policy, 32768, 512, **changes)
