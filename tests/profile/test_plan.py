"""The plan's figures against the floor tables, through the real resolver."""

from __future__ import annotations

import json

import pytest

from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.policies import resolve
from kvc_trt.profile.plan import make_plan

# context in K, token budget, ceiling at batch 1, 8, 32 (bf16)
CEILINGS = [
    (16, 2048, (1.12, 1.88, 3.54)),
    (16, 256, (1.14, 2.11, 5.20)),
    (32, 1024, (1.27, 3.07, 7.90)),
    (32, 512, (1.28, 3.18, 8.88)),
    (64, 512, (1.57, 5.39, 16.89)),
    (128, 2048, (2.11, 8.88, 23.90)),
    (128, 512, (2.14, 9.81, 32.92)),
    (128, 256, (2.14, 9.98, 35.11)),
]


def plan_of(name="llama3.1-8b", policy="rocketkv", sequence=131072, budget=512, weights="bf16"):
    model = load_preset(name).config
    parameters = resolve(policy, model=model, token_budget=budget, max_input_len=sequence - 128, max_output_len=128)
    return make_plan(model, parameters, weights)


@pytest.mark.parametrize(("context", "budget", "ceilings"), CEILINGS)
def test_ceilings_within_what_rounding_the_budget_moves(context, budget, ceilings):
    """Our resolver rounds r and p down where the table rounds to nearest: 1% in pairs, less in the ceiling."""
    speed = plan_of(sequence=context * 1024, budget=budget)["speed"]
    for gpu in ("H100", "H200"):
        found = [entry["ceiling_speedup"] for entry in speed if entry["accelerator"] == gpu]
        assert found == pytest.approx(ceilings, rel=0.01)


def test_floor_and_memory_marks():
    speed = {(entry["accelerator"], entry["batch"]): entry for entry in plan_of()["speed"]}
    assert speed["H100", 1]["full"]["floor_ms"] == pytest.approx(9.61, abs=0.006)
    assert speed["H200", 32]["full"]["floor_ms"] == pytest.approx(117.66, abs=0.02)
    assert speed["H100", 8]["compressed"]["floor_tokens_per_s"] == pytest.approx(1724, abs=2)
    assert [speed["H100", batch]["full"]["fits"] for batch in (1, 8, 32)] == [True, False, False]
    assert all(entry["compressed"]["fits"] for entry in speed.values())


def test_break_even_grows_with_overhead_and_shrinks_with_batch():
    entries = plan_of()["break_even"]
    found = {
        (entry["accelerator"], entry["batch"], entry["overhead_us_per_layer_assumed"]): entry["context_tokens"]
        for entry in entries
    }
    assert found["H100", 1, 10] == pytest.approx(512 + 8179, abs=2)
    assert found["H200", 1, 20] == pytest.approx(512 + 23437, abs=2)
    assert found["H100", 1, 5] < found["H100", 1, 10] < found["H100", 1, 20]
    assert found["H200", 32, 10] < found["H200", 8, 10] < found["H200", 1, 10]


@pytest.mark.parametrize("policy", ["full", "snapkv++"])
def test_policies_without_selection_have_no_break_even(policy):
    assert plan_of(policy=policy)["break_even"] == []


def test_full_gains_nothing():
    plan = plan_of(policy="full")
    assert {entry["ceiling_speedup"] for entry in plan["speed"]} == {1.0}
    assert plan["cache"]["full_bytes_per_row"] == plan["cache"]["compressed_bytes_per_row"] == 2**34


@pytest.mark.parametrize("name", [preset if isinstance(preset, str) else preset.name for preset in list_presets()])
def test_every_preset_has_a_plan_that_is_json(name):
    plan = plan_of(name, sequence=1024, budget=256, weights="int4")
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan
    assert plan["traffic"]["bytes_per_row"] <= plan["traffic"]["full_bytes_per_row"]


@pytest.mark.parametrize(
    ("policy", "shared", "agnostic"),
    [
        ("full", True, True),
        ("hybrid", True, True),
        ("sparq", True, True),
        ("streaming-llm", False, True),
        ("keydiff", False, True),
        ("expected-attention", False, True),
        ("rocketkv", False, False),
        ("snapkv-gqa", False, False),
        ("h2o", False, False),
        ("tova", False, False),
    ],
)
def test_what_prefixes_share(policy, shared, agnostic):
    context = plan_of(policy=policy)["context"]
    assert (context["shared_by_default"], context["query_agnostic"]) == (shared, agnostic)


def test_bytes_of_a_stored_context():
    """Keys and values that are kept, without page bounds, and the logits; what a policy carries besides for turns."""
    logits, token = 4 * 128256, 2 * 8 * 128 * 2  # one layer's keys and values of a token, 16 bits
    rocketkv, full = plan_of(), plan_of(policy="full")
    assert rocketkv["context"]["tokens"] == 131072 - 128
    positions = 8 * rocketkv["policy"]["capacity"] * 4
    assert rocketkv["context"]["bytes"] == 32 * (rocketkv["policy"]["prompt_budget"] * token + positions) + logits
    assert full["context"]["bytes"] == 32 * (131072 - 128) * token + logits
    assert plan_of(policy="hybrid")["context"]["bytes"] == full["context"]["bytes"]
    assert plan_of(policy="sparq")["context"]["bytes"] == full["context"]["bytes"] + 32 * 8 * 128 * 4
    assert plan_of(policy="h2o")["context"]["bytes"] == 32 * (512 * token + 8 * 513 * (4 + 4)) + logits
