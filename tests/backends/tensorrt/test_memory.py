"""The memory plan: it covers every byte of the block, and a refusal says how much is missing and what helps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.backends.tensorrt.building.profiles import prefill_profiles
from kvc_trt.backends.tensorrt.forecast import device_memory, plan_device
from kvc_trt.backends.tensorrt.running import memory
from kvc_trt.backends.tensorrt.running.memory import (
    BufferSizes,
    EngineBytes,
    check_fits,
    plan_memory,
    remedies,
    sizes_for,
)
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import state_tensors
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import resolve
from kvc_trt.profile.accelerators import HOPPER
from kvc_trt.profile.model_size import weight_bytes

GIB = 2**30
LLAMA = load_preset("llama3.1-8b").config
BF16, WEIGHTS = replace(LLAMA, dtype="bfloat16"), weight_bytes(LLAMA, "bf16").resident
GPUS = {gpu.name: gpu.usable for gpu in HOPPER}


def parameters_of(policy="rocketkv", budget=512, longest=32640, **overrides):
    return resolve(policy, model=LLAMA, token_budget=budget, max_input_len=longest, max_output_len=128, **overrides)


def plan_of(rows=8, engine=None, **options):
    parameters = parameters_of(**options)
    state = state_tensors(LLAMA, parameters, "bfloat16")
    sizes = sizes_for(prefill_profiles(parameters.max_input_len, rows), rows)
    return plan_memory(LLAMA.vocab_size, state, engine or EngineBytes(15 * GIB, 15 * GIB, 3 * GIB, "engine"), sizes)


def test_caches_and_bounds_are_counted_to_the_byte():
    parameters, plan = parameters_of(), plan_of(rows=3)
    tokens = 32 * parameters.capacity * 2 * 8 * 128 * 2
    bounds = 32 * parameters.stored_pages("bfloat16") * 2 * 8 * 128 * 2
    assert plan.of("caches") == 3 * tokens
    assert plan.of("page bounds") == 3 * bounds
    assert plan.of("state of prompts being prefilled") == tokens + bounds


def test_skipped_layers_stand_apart():
    plan = plan_of(skip_layers=2)
    parameters = parameters_of(skip_layers=2)
    assert [(line.first_layer, line.last_layer, line.slots, line.pages) for line in plan.caches] == [
        (0, 1, 32768, 0),
        (2, 31, parameters.capacity, parameters.stored_pages("bfloat16")),
    ]
    assert sum(
        line.bytes_per_row * (line.last_layer - line.first_layer + 1) for line in plan.caches
    ) * plan.sizes.rows == plan.of("caches", "page bounds")


@given(st.integers(1, 40), st.integers(0, 10**9), st.sampled_from(["rocketkv", "full", "snapkv++", "hybrid"]))
def test_the_plan_is_the_block_that_will_be_allocated(rows, activations, policy):
    """Weights and CUDA graphs aside, the lines add up to the layout's last byte, and no two regions meet."""
    parameters = parameters_of(policy)
    state = state_tensors(LLAMA, parameters, "float16")
    sizes = sizes_for(prefill_profiles(parameters.max_input_len, rows), rows)
    plan = plan_memory(LLAMA.vocab_size, state, EngineBytes(7, 8, activations, "engine"), sizes)
    wanted = memory.regions(LLAMA.vocab_size, 32, state, sizes, activations)
    laid, total = memory.lay_out(wanted)
    assert total == plan.total - plan.of("weights of decode", "weights of prefill", "CUDA graphs")
    assert {name: region.size for name, region in laid.items()} == dict(wanted)
    ordered = sorted(laid.values(), key=lambda region: region.offset)
    assert all(region.offset % memory.ALIGNMENT == 0 for region in ordered)
    assert all(first.offset + first.size <= second.offset for first, second in pairwise(ordered))
    assert ordered[-1].offset + ordered[-1].size <= total


def test_prompts_are_staged_an_eighth_of_the_rows_at_a_time():
    profiles = prefill_profiles(32640, 32)
    assert sizes_for(profiles, 32) == BufferSizes(32, 4, 32640)
    assert sizes_for(profiles, 1) == BufferSizes(1, 1, 32640)
    assert sizes_for(prefill_profiles(1024, 64), 64) == BufferSizes(64, 8, 8 * 1024)


def test_plans_that_fit_are_not_reported():
    plan = plan_of()
    check_fits(plan, plan.total)


def test_plans_that_do_not_fit_say_by_how_much_and_what_helps():
    plan = plan_of(rows=32)
    with pytest.raises(UnsupportedEnvironment) as caught:
        check_fits(plan, plan.total - GIB)
    message, hint = caught.value.message, caught.value.hint
    assert "does not fit the GPU's memory by 1.0 GiB: expected" in message
    assert "for 32 rows (weights of decode 15.0 GiB, weights of prefill 15.0 GiB, caches" in message
    assert f"found {(plan.total - GIB) / GIB:.1f} GiB free" in message
    assert hint.startswith("run at most 31 rows at once; or build with --max-input-len ")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("policy", ["rocketkv", "full"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_the_rows_that_are_said_to_fit_do_fit_and_one_more_does_not(policy, share):
    engine = EngineBytes(15 * GIB, 15 * GIB, 3 * GIB, "engine")
    plan = plan_of(rows=32, policy=policy, engine=engine)
    fixed = plan.of("weights of decode", "weights of prefill", memory.ACTIVATIONS)
    free = fixed + int(share * (plan.total - fixed))
    said = [line for line in remedies(plan, plan.total - free) if line.startswith("run at most")]
    rows = int(said[0].split()[3])
    assert plan_of(rows=rows, policy=policy, engine=engine).total <= free
    assert plan_of(rows=rows + 1, policy=policy, engine=engine).total > free


def test_a_plan_that_nothing_shrinks_asks_for_a_larger_gpu():
    plan = plan_of(rows=1)
    assert remedies(plan, plan.total * 2) == ["a GPU with more memory, or a smaller model"]


def test_weights_are_there_once_for_each_engine():
    plan = plan_device(BF16, parameters_of(), WEIGHTS, 8)
    assert plan.of("weights of decode") == plan.of("weights of prefill") > 16_060_522_496
    assert {line.known for line in plan.lines} == {"modelled", "exact", "assumed"}


def test_compaction_and_longer_prompts_need_more():
    longer = plan_device(BF16, parameters_of(longest=130_000), WEIGHTS, 1)
    shorter = plan_device(BF16, parameters_of(), WEIGHTS, 1)
    kept = plan_device(BF16, parameters_of("full"), WEIGHTS, 1)
    assert longer.of(memory.ACTIVATIONS) > 3.9 * shorter.of(memory.ACTIVATIONS)
    assert kept.of(memory.ACTIVATIONS) < shorter.of(memory.ACTIVATIONS)


def test_device_memory_compares_the_plan_with_every_gpu():
    found = device_memory(BF16, parameters_of("full", longest=65_000), WEIGHTS, 8, GPUS)
    assert found["total_bytes"] == sum(line["bytes"] for line in found["lines"])
    h100 = found["gpus"][0]
    assert h100["fits_by_bytes"] == h100["usable_bytes"] - found["total_bytes"] < 0
    assert h100["what_helps"] == ["build with a smaller --token-budget, or a policy that evicts"]
    assert device_memory(BF16, parameters_of(), WEIGHTS, 8, GPUS)["gpus"][1]["what_helps"] == []
