"""The plan's figures against the floor tables, through the real resolver."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import kvc_trt
from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.policies import available, named, resolve
from kvc_trt.profile.planning.placement import on_one_gpu
from kvc_trt.profile.planning.plan import make_plan

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
    return make_plan(on_one_gpu(model, parameters, weights, turns=True))


@pytest.mark.parametrize(("context", "budget", "ceilings"), CEILINGS)
def test_ceilings_match_the_golden_table_within_one_percent(context, budget, ceilings):
    """Our resolver rounds r and p down where the table rounds to nearest: 1% in pairs, less in the ceiling."""
    speed = plan_of(sequence=context * 1024, budget=budget)["speed"]
    for gpu in ("H100", "H200"):
        found = [entry["ceiling_speedup"] for entry in speed if entry["accelerator"] == gpu]
        assert found == pytest.approx(ceilings[: len(found)], rel=0.01)
        assert len(found) == (2 if (gpu, context, budget) == ("H100", 128, 2048) else 3)  # 32 such rows do not fit


def test_floors_and_fits_match_known_values():
    speed = {(entry["accelerator"], entry["batch"]): entry for entry in plan_of()["speed"]}
    assert speed["H100", 1]["full"]["floor_ms"] == pytest.approx(9.61, abs=0.006)
    assert speed["H100", 8]["compressed"]["floor_tokens_per_s"] == pytest.approx(1726, abs=2)
    assert [speed["H100", batch]["full"]["fits"] for batch in (1, 8, 32)] == [True, False, False]
    assert speed["H200", 32]["full"] == {"fits": False, "floor_ms": None, "floor_tokens_per_s": None}
    assert all(entry["compressed"]["fits"] for entry in speed.values())


def test_every_batch_up_to_the_largest_fits():
    """One model of memory: every batch up to the largest has a floor, and none beyond it."""
    plan = plan_of()
    for gpu in plan["gpus"]:
        for side in ("full", "compressed"):
            found = [entry for entry in plan["speed"] if entry["accelerator"] == gpu["name"] and entry[side]["fits"]]
            assert [entry["batch"] for entry in found] == [b for b in (1, 8, 32) if b <= gpu["largest_batch"][side]]


def test_a_prompts_operations_are_the_floor_of_its_first_token():
    [h100, _] = plan_of(sequence=32768)["gpus"]
    attention = 2 * 32 * 32 * 128 * 32640**2
    assert h100["first_token_floor_ms"] == pytest.approx(1e3 * (2 * 6_979_321_856 * 32640 + attention) / 989e12)


def test_a_budget_beyond_the_sequence_compresses_nothing():
    assert plan_of(sequence=4096, budget=512)["compresses"]
    for policy, budget in (("rocketkv", 4096), ("snapkv-gqa", 8192), ("hybrid", 5000), ("full", 512)):
        assert not plan_of(policy=policy, sequence=4096, budget=budget)["compresses"]


@pytest.mark.parametrize("policy", [name for name, *_ in available()])
def test_a_split_is_told_where_it_decides_something(policy):
    model, given = load_preset("llama3.1-8b").config, {"token_budget": 512, "max_input_len": 4096}
    plan = make_plan(on_one_gpu(model, resolve(policy, model=model, max_output_len=8, **given), "bf16", turns=True))
    if not named(policy).divides:
        assert "split" not in plan["policy"]
    elif named(policy).split is None:
        adaptive, even = (
            replace(resolve(policy, model=model, max_output_len=8, split=split, **given), split="")
            for split in ("adaptive", "even")
        )
        assert adaptive != even
        assert "split" in plan["policy"]
    else:
        assert plan["policy"]["split"] == named(policy).split


def test_break_even_grows_with_overhead_and_shrinks_with_batch():
    entries = plan_of()["break_even"]
    found = {
        (entry["accelerator"], entry["batch"], entry["overhead_us_per_layer_assumed"]): entry["context_tokens"]
        for entry in entries
    }
    assert found["H100", 1, 10] == pytest.approx(512 + 8159, abs=2)
    assert found["H200", 1, 20] == pytest.approx(512 + 23418, abs=2)
    assert found["H100", 1, 5] < found["H100", 1, 10] < found["H100", 1, 20]
    assert found["H200", 32, 10] < found["H200", 8, 10] < found["H200", 1, 10]


@pytest.mark.parametrize("policy", ["full", "snapkv++"])
def test_policies_without_selection_have_no_break_even(policy):
    assert plan_of(policy=policy)["break_even"] == []


def test_the_full_cache_has_a_ceiling_of_one():
    plan = plan_of(policy="full")
    assert {entry["ceiling_speedup"] for entry in plan["speed"]} == {1.0}
    assert plan["cache"]["full_bytes_per_row"] == plan["cache"]["compressed_bytes_per_row"] == 2**34


@pytest.mark.parametrize("name", [preset if isinstance(preset, str) else preset.name for preset in list_presets()])
def test_every_preset_has_a_plan_that_is_json(name):
    plan = plan_of(name, sequence=1024, budget=256, weights="int4")
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan
    assert plan["traffic"]["bytes_per_row"] <= plan["traffic"]["full_bytes_per_row"]


@pytest.mark.parametrize(("name", "token_bytes"), [("qwen2.5-7b-128k", 57344), ("qwen3-8b-128k", 147456)])
def test_cache_bytes_of_128k_presets_match_the_formula(name, token_bytes):
    """Keys and values of a token in bf16: 28 layers of 4 KV heads, 36 of 8, of 128 channels."""
    plan = plan_of(name)
    assert plan["cache"]["full_bytes_per_row"] == 131072 * token_bytes
    assert plan["cache"]["compressed_bytes_per_row"] < 131072 * token_bytes / 10


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
def test_plans_count_shared_prefixes(policy, shared, agnostic):
    context = plan_of(policy=policy)["context"]
    assert (context["shared_by_default"], context["query_agnostic"]) == (shared, agnostic)


def test_no_prefix_is_shared_by_itself_where_layers_slide():
    """rocketkv-mt keeps the whole text beside what steps read, but a sliding layer keeps its window alone."""
    assert plan_of(policy="rocketkv-mt")["context"]["shared_by_default"]
    assert not plan_of("gemma-3-12b", policy="rocketkv-mt", sequence=8192)["context"]["shared_by_default"]


def test_bytes_of_a_stored_context_match_the_formula():
    """Keys and values that are kept, without page bounds, and the logits; what a policy carries besides for turns."""
    logits, token = 4 * 128256, 2 * 8 * 128 * 2  # one layer's keys and values of a token, 16 bits
    rocketkv, full = plan_of(), plan_of(policy="full")
    assert rocketkv["context"]["tokens"] == 131072 - 128
    positions = 8 * rocketkv["policy"]["capacity"] * 4
    assert rocketkv["policy"]["prompt_budget"] > 2891  # what the longest prompt keeps
    assert rocketkv["context"]["bytes"] == 32 * (2891 * token + positions) + logits
    assert full["context"]["bytes"] == 32 * (131072 - 128) * token + logits
    assert plan_of(policy="hybrid")["context"]["bytes"] == full["context"]["bytes"]
    assert plan_of(policy="sparq")["context"]["bytes"] == full["context"]["bytes"] + 32 * 8 * 128 * 4
    assert plan_of(policy="h2o")["context"]["bytes"] == 32 * (512 * token + 8 * 513 * (4 + 4)) + logits


@pytest.mark.parametrize("policy", ["rocketkv", "full", "rocketkv-mt", "hybrid", "h2o", "streaming-llm", "keydiff"])
def test_planned_conversation_and_prefix_bytes_equal_the_built_engines(policy, tiny_model, tmp_path, capfd):
    """The figures are the engine's state tensors to the byte, and a context of its longest prompt."""
    from kvc_trt import Engine, plan
    from kvc_trt.cli.main import run

    settings = ("--policy", policy, "--max-input-len", "256", "--max-output-len", "32", "--max-conversation-len", "640")
    given = [*settings, *(() if policy == "full" else ("--token-budget", "64"))]
    model = ("--model", str(tiny_model))
    build = ["build", *model, "--random-weights", "0", "--weights", "fp32", "--no-verify", *given]
    assert run([*build, "-o", str(tmp_path / "engine")]) == 0
    capfd.readouterr()
    assert run(["plan", *model, "--weights", "fp32", *given, "--json"]) == 0
    planned = json.loads(capfd.readouterr().out)
    with Engine.open(tmp_path / "engine") as engine:
        state = {tensor.name: tensor.bytes_per_row() for tensor in engine.directory.state}
        assert planned["cache"]["compressed_bytes_per_row"] == sum(state.values())
        assert engine.session().executor.state_bytes() == sum(state.values())
        places = sum(size for name, size in state.items() if name.startswith("slot_positions") and policy != "h2o")
        assert planned["conversation"] == {
            "takes_turns": True, "positions": 640, "longest_turn": 256, "slot_positions_bytes_per_row": places,
        }  # fmt: skip
        assert engine.parameters.max_sequence_len == 640
        assert planned["context"]["bytes"] == engine.context([3] * 256).nbytes
    longer = plan(str(tiny_model), policy=policy, weights="fp32", max_input_len=256, max_output_len=32)
    if policy == "full":
        assert planned["cache"]["compressed_bytes_per_row"] * 288 == 640 * longer["cache"]["compressed_bytes_per_row"]


def test_a_backend_without_turns_keeps_no_places():
    model = load_preset("llama3.1-8b").config
    parameters = resolve("rocketkv", model=model, token_budget=512, max_input_len=32640, max_output_len=128)
    with_turns, without = (make_plan(on_one_gpu(model, parameters, "bf16", turns=turns)) for turns in (True, False))
    places = with_turns["conversation"]["slot_positions_bytes_per_row"]
    assert places == 4 * 32 * 8 * parameters.capacity
    assert without["conversation"] == {
        "takes_turns": False, "positions": 32768, "longest_turn": 0, "slot_positions_bytes_per_row": 0,
    }  # fmt: skip
    rows = [one["cache"]["compressed_bytes_per_row"] for one in (with_turns, without)]
    assert rows[0] - rows[1] == places
    assert without["context"]["bytes"] < with_turns["context"]["bytes"]


@pytest.mark.parametrize("policy", ["h2o", "tova", "streaming-llm"])
def test_a_floor_counts_the_bytes_that_the_plan_says_a_step_reads(policy):
    """This holds under budgets by prompt too, where a row is allocated more than it uses."""
    found = kvc_trt.plan(
        "llama3.1-8b", policy=policy, layer_budget="squeeze-online", token_budget=1024, max_input_len=32512
    )
    h100 = [entry for entry in found["speed"] if entry["accelerator"] == "H100"]
    speed = {entry["batch"]: entry["compressed"]["floor_ms"] for entry in h100}
    bandwidth = next(gpu["bandwidth"] for gpu in found["gpus"] if gpu["name"] == "H100")
    read = (speed[8] - speed[1]) / 7 / 1e3 * bandwidth
    assert read == pytest.approx(found["traffic"]["bytes_per_row"], rel=1e-6)
