"""Policies side by side: bytes that are really allocated, beside the papers' formulas."""

from __future__ import annotations

import json

import pytest

from kvc_trt.cli.main import run
from kvc_trt.config import BuildConfig
from kvc_trt.engine.resolution.model_choice import choose_model
from kvc_trt.policies import describe
from kvc_trt.profile.planning.request import compare_policies


def compared(**settings: object) -> dict[str, dict[str, object]]:
    config = BuildConfig(**{"model": "llama3.1-8b", "max_input_len": 32640, "max_output_len": 128, **settings})
    comparison = compare_policies(config, choose_model("llama3.1-8b", None), "bf16")
    return {row["policy"]: row for row in comparison["policies"]}


def test_every_policy_has_a_row_and_dense_is_the_unit() -> None:
    rows = compared(token_budget=512)
    assert list(rows) == [one.name for one in describe()]
    assert rows["full"]["stored_bytes"] == 2**32
    assert rows["full"]["read_share"] == 1
    positions = 4 / (2 * 128 * 2)  # a number per slot beside key and value in bfloat16, which turns need
    assert rows["snapkv-gqa"]["stored_share"] == pytest.approx((1 + positions) / 64)
    assert rows["sparq"]["stored_share"] == pytest.approx(1.5, abs=1e-4)  # a second copy of the keys
    assert rows["quest-matched"]["stored_share"] == pytest.approx(1 + 1 / 64, abs=1e-3)


@pytest.mark.parametrize("policy", ["rocketkv", "rocketkv-v1", "hybrid", "quest-matched", "sparq", "h2o", "snapkv-gqa"])
def test_a_step_reads_about_the_budget(policy: str) -> None:
    assert compared(token_budget=512)[policy]["read_share"] == pytest.approx(1 / 64, rel=0.03)


def test_budgets_that_rule_a_policy_out_are_reported() -> None:
    rows = compared(token_budget=128)
    assert "not_applicable" not in rows["rocketkv"]
    assert "observation window" in str(rows["snapkv"]["not_applicable"])


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "llama3.1-8b", "--token-budget", "128", "--compare"]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    assert "quest-matched" in text
    assert "\nsnapkv: not applicable: the prompt budget is" in text
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_budget"] == 128


def test_a_budget_that_rules_out_every_policy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "llama3.1-8b", "--token-budget", "1", "--compare"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "error: no policy can be built so: token_budget is 1; expected an integer at least 16" in shown.err


def test_a_setting_of_single_policies_is_not_dropped_silently(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "llama3.1-8b", "--compare", "--set", "page_size=8"]) == 2
    assert "--set page_size: --compare shows every policy" in capsys.readouterr().err
    assert run(["plan", "--model", "llama3.1-8b", "--compare", "--set", "layer_budget=uniform"]) == 0
