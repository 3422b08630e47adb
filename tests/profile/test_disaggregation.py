"""The traffic between prefill and decode, and the number of workers: against the formulas, by hand."""

from __future__ import annotations

import pytest

from kvc_trt import policies
from kvc_trt.models.presets import load_preset
from kvc_trt.profile.model_size import prefill_operations
from kvc_trt.profile.planning.disaggregation import plan_disaggregation
from kvc_trt.profile.planning.placement import on_one_gpu

MODEL = load_preset("llama3.1-8b").config


def plan_of(policy: str, bandwidth: float = 12.5e9, prompt: int = 32640, turns: bool = False):
    budget = None if policy == "full" else 512
    parameters = policies.resolve(policy, model=MODEL, token_budget=budget, max_input_len=prompt, max_output_len=128)
    return plan_disaggregation(on_one_gpu(MODEL, parameters, "bf16", turns=turns), bandwidth)


def test_the_full_cache_is_every_key_and_value_and_the_logits():
    found = plan_of("rocketkv")["full"]
    assert found["bytes"] == 2 * 32 * 8 * 128 * 2 * 32640 + 4 * 128256
    assert found["transfer_seconds"] == pytest.approx(found["bytes"] / 12.5e9)
    assert found["handoffs_per_second"] == pytest.approx(12.5e9 / found["bytes"])


def test_policies_without_eviction_send_the_whole_cache():
    found = plan_of("full")
    assert found["compressed"]["bytes"] == found["full"]["bytes"]
    assert all(one["full"] == one["compressed"] for one in found["replicas"])


def test_a_policy_that_evicts_sends_less_and_its_rows_are_more():
    found = plan_of("rocketkv")
    assert found["compressed"]["bytes"] < found["full"]["bytes"] / 8
    for one in found["replicas"]:
        assert one["full"]["rows"] < one["compressed"]["rows"] == 32


def test_replicas_follow_from_the_slower_of_prefill_and_network():
    (replica, _) = plan_of("rocketkv")["replicas"]
    side, operations = replica["compressed"], prefill_operations(MODEL, 32640)
    assert replica["prefill_seconds"] == pytest.approx(operations / 989e12)
    each_answer = side["answer_seconds"] / side["rows"]
    assert side["limit"] == "prefill"
    assert side["decode_replicas"] == pytest.approx(each_answer / replica["prefill_seconds"])
    slow = plan_of("rocketkv", bandwidth=1e7)
    side = slow["replicas"][0]["compressed"]
    assert side["limit"] == "network"
    assert side["decode_replicas"] == pytest.approx(
        side["answer_seconds"] / side["rows"] / slow["compressed"]["transfer_seconds"]
    )


def test_places_for_turns_travel_too():
    assert plan_of("rocketkv", turns=True)["compressed"]["bytes"] > plan_of("rocketkv")["compressed"]["bytes"]
