"""Names and sizes of the grid, and mistakes in them."""

from __future__ import annotations

import pytest

from kvc_trt.accuracy.grid import (
    QuestionGroup,
    Variant,
    budgets_of,
    grid_for,
    longest_of,
    policies_of,
    question_groups,
    variants,
)
from kvc_trt.errors import InputError


def test_full_is_first_and_has_no_budget():
    assert variants(["hybrid", "full", "hybrid"], [128, 64, 64]) == [
        Variant("full", None), Variant("hybrid", 64), Variant("hybrid", 128),
    ]  # fmt: skip


def test_a_policy_may_carry_settings():
    (_, one) = variants(["hybrid:page_size=4:top_r=8"], [64])
    assert (one.name, dict(one.settings)) == ("hybrid", {"page_size": 4, "top_r": 8})


def test_the_whole_cache_may_have_a_format_and_nothing_else():
    assert variants(["full:kv_cache=int8", "full"], [64, 128]) == [
        Variant("full", None), Variant("full:kv_cache=int8", None),
    ]  # fmt: skip
    with pytest.raises(InputError, match="full:skip_layers=1: full is the baseline of the comparison, and takes no"):
        variants(["full:skip_layers=1"], [64])


@pytest.mark.parametrize(
    ("names", "message"),
    [(["rocketvk"], "did you mean 'rocketkv'"), (["hybrid:pages=4"], "unknown key"), (["hybrid:"], "expected key")],
)
def test_an_invalid_policy_is_refused_by_name(names: list[str], message: str):
    with pytest.raises(InputError, match=message):
        variants(names, [64])


def test_groups_run_from_short_to_long_with_both_modes_of_a_task_side_by_side():
    found = question_groups(["lines", "niah-single-1", "lines"], [1024, 512], ["query-agnostic", "query-aware"])
    assert found[:3] == [
        QuestionGroup("lines", "query-aware", 512), QuestionGroup("lines", "query-agnostic", 512),
        QuestionGroup("niah-single-1", "query-aware", 512),
    ]  # fmt: skip
    assert len(found) == 8


def test_an_invalid_task_or_mode_is_refused_by_name():
    with pytest.raises(InputError, match="did you mean 'niah-single-1'"):
        question_groups(["niah-single"], [512], ["query-aware"])
    with pytest.raises(InputError, match="did you mean 'query-aware'"):
        question_groups(["lines"], [512], ["aware"])


def test_questions_may_go_through_a_chat_template():
    groups = question_groups(["passkey"], [512], ["query-aware"], ["chat", "plain"])
    assert [str(group) for group in groups] == [
        "passkey, 512 tokens, query-aware", "passkey, 512 tokens, query-aware, chat",
    ]  # fmt: skip
    with pytest.raises(InputError, match="unknown framing 'chatty'; did you mean 'chat'"):
        question_groups(["passkey"], [512], ["query-aware"], ["chatty"])


def test_a_policy_with_a_budget_of_its_own_is_asked_once():
    found = variants(["snapkv", "streaming-llm:token_budget=20%:layer_budget=squeeze"], [64, 128])
    own = "streaming-llm:token_budget=20%:layer_budget=squeeze"
    assert [str(one) for one in found] == ["full", "snapkv 64", "snapkv 128", own]
    assert found[-1] == Variant.of(own, 64)
    assert found[-1].settings == {"token_budget": "20%", "layer_budget": "squeeze"}


def test_defaults_are_the_models_own():
    assert budgets_of("retrieval-tiny") == (64, 128, 256)
    assert longest_of("retrieval-tiny") == 2048
    assert "full" in policies_of(None)
    assert {group.length for group in grid_for(2048, None, None, None)} == {512, 1024, 2048}
    assert {group.length for group in grid_for(300, None, None, None)} == {300}
