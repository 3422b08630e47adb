"""Policies side by side: bytes that are really allocated, beside the papers' formulas."""

from __future__ import annotations

import json

import pytest

from kvc_trt.cli.main import run
from kvc_trt.config import BuildConfig
from kvc_trt.engine.resolution.model_choice import choose_model
from kvc_trt.errors import InputError
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import describe, resolve
from kvc_trt.profile.planning.comparison import compare_policies


def compared(**settings: object) -> dict[str, dict[str, object]]:
    config = BuildConfig(**{"model": "llama3.1-8b", "max_input_len": 32640, "max_output_len": 128, **settings})
    comparison = compare_policies(config, choose_model("llama3.1-8b", None), "bf16", turns=True)
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


def test_a_split_is_for_the_policies_that_divide_their_budget() -> None:
    even, adaptive = compared(token_budget=512, split="even"), compared(token_budget=512)
    assert even["quest"] == adaptive["quest"]
    assert even["rocketkv"]["stored_bytes"] != adaptive["rocketkv"]["stored_bytes"]


def test_the_formula_of_the_even_split_is_of_that_version_alone() -> None:
    rows = compared(token_budget=512)
    compression = 32768 / 512
    assert rows["rocketkv-v1"]["stored_share_by_formula"] == compression**-0.5 + 2 * compression**-0.75
    assert rows["rocketkv"]["stored_share_by_formula"] is rows["rocketkv-v2"]["stored_share_by_formula"] is None
    assert rows["rocketkv"]["read_share_by_formula"] == 1 / compression


@pytest.mark.parametrize("policy", ["rocketkv", "rocketkv-v1", "hybrid", "quest-matched", "sparq", "h2o", "snapkv-gqa"])
def test_a_step_reads_about_the_budget(policy: str) -> None:
    assert compared(token_budget=512)[policy]["read_share"] == pytest.approx(1 / 64, rel=0.03)


@pytest.mark.parametrize(("kv_cache", "numbers"), [("int8", 2), ("fp8", 1), ("int4", 4 * 4)])
def test_a_step_that_scores_codes_reads_their_scales_and_minima(kv_cache: str, numbers: int) -> None:
    """8 channels of each key in a byte each, in int4 of up to 4 groups; then 1,920 pairs, and a mean of the values."""
    [row] = [one for name, one in compared(token_budget=2048, kv_cache=kv_cache).items() if name == "sparq"]
    parameters = resolve(
        "sparq", model=load_preset("llama3.1-8b").config, token_budget=2048, max_input_len=32640, max_output_len=128
    )
    pair = CACHE_FORMATS[kv_cache].bytes_per_token(128, 2)
    read = 32_768 * (parameters.top_r + numbers) + parameters.most_read * pair + 128
    assert row["read_bytes_per_step"] == 32 * 8 * read


def test_a_backend_that_has_no_caches_in_a_format_is_said_in_every_row() -> None:
    config = BuildConfig(model="llama3.1-8b", token_budget=512, backend="tensorrt-llm", max_input_len=32640)
    found = compare_policies(config, choose_model("llama3.1-8b", None), "bf16", turns=True)
    assert "not_applicable" not in found["policies"][0]
    assert all("backend tensorrt-llm has no caches in" in row["not_applicable"] for row in found["whole_caches"])
    with pytest.raises(InputError, match="policy full: backend tensorrt-llm has no caches in int8"):
        compare_policies(
            config.model_copy(update={"kv_cache": "int8"}), choose_model("llama3.1-8b", None), "bf16", turns=True
        )


def test_budgets_that_rule_a_policy_out_are_reported() -> None:
    rows = compared(token_budget=128)
    assert "not_applicable" not in rows["rocketkv"]
    assert "observation window" in str(rows["snapkv"]["not_applicable"])


def test_a_recommended_policy_is_compared_at_its_own_budget(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "smollm2-135m-instruct", "--compare"]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("smollm2-135m-instruct, token budget 768: ")
    assert "\nthe budget is that of snapkv-gqa, which is recommended for this model\n" in text
    assert "\nsnapkv-gqa  " in text
    for given, expected in (
        (["--token-budget", "256"], (256, None)),
        (["--max-output-len", "64"], (576, "snapkv-gqa")),
    ):
        assert run([*arguments, *given, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["token_budget"], found["recommended"]) == expected


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
    assert (
        "error: no policy can be built with these settings: token_budget is 1; expected an integer at least 16"
        in shown.err
    )


def test_a_setting_of_single_policies_is_not_dropped_silently(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "llama3.1-8b", "--compare", "--set", "page_size=8"]) == 2
    assert "--set page_size: --compare shows every policy" in capsys.readouterr().err
    assert run(["plan", "--model", "llama3.1-8b", "--compare", "--set", "layer_budget=uniform"]) == 0
