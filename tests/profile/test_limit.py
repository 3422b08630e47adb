"""The largest budget that fits a memory: it fits, the next one does not, and its bytes are the plan's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import plan
from kvc_trt.errors import InputError
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.policies import describe
from kvc_trt.profile.planning.limit import largest_budget

SMOL = "smollm2-135m-instruct"
MIB = 1 << 20


@given(least=st.integers(1, 60), fixed=st.integers(0, 500), each=st.integers(1, 9), bend=st.integers(0, 100),
       memory=st.integers(1, 6000), longest=st.integers(61, 5000))  # fmt: skip
def test_the_largest_budget_is_found_on_any_curve_that_does_not_fall(least, fixed, each, bend, memory, longest):
    """An oracle that tries every budget; a bend is where a further page of bounds begins."""

    def needed(budget):
        if budget < least:
            raise InputError("too small")
        return fixed + each * budget + 40 * (budget > bend)

    fitting = [budget for budget in range(least, longest + 1) if needed(budget) <= memory]
    found = largest_budget(needed, memory, longest)
    assert found.budget == (max(fitting) if fitting else None)
    assert found.needed == needed(found.budget or least)


def table(**asked):
    [found] = plan(SMOL, max_input_len=2048, max_output_len=64, **asked)["tables"]
    return found["budgets"]


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(mebibytes=st.integers(4, 90), rows=st.sampled_from([1, 3]), data=st.data())
def test_the_largest_budget_fits_and_one_token_more_does_not(mebibytes, rows, data):
    memory = mebibytes * MIB
    fitting = [entry for entry in table(memory=memory, rows=rows) if "bytes_per_row" in entry]
    entry = data.draw(st.sampled_from(fitting))
    own = {"policy": entry["policy"], "kv_cache": entry["kv_cache"], "max_input_len": 2048, "max_output_len": 64}

    def bytes_at(budget):
        given = {} if budget is None else {"token_budget": budget}
        return plan(SMOL, **own, **given)["cache"]["compressed_bytes_per_row"]

    assert entry["bytes_per_row"] == bytes_at(entry["token_budget"])
    assert entry["rows"] == memory // entry["bytes_per_row"] >= rows
    if entry["compresses"]:
        assert rows * bytes_at(entry["token_budget"] + 1) > memory


def test_every_policy_that_an_engine_runs_has_a_line_for_every_format():
    found = table(memory=12 * MIB)
    engines = [one.name for one in describe() if not one.name.startswith("exact-topk")]
    assert [(entry["policy"], entry["kv_cache"]) for entry in found] == [
        (policy, form) for policy in engines for form in CACHE_FORMATS
    ]
    by_name = {(entry["policy"], entry["kv_cache"]): entry for entry in found}
    assert by_name["full", "auto"]["least_needed_bytes"] == 30 * 3 * 64 * 2 * 4 * (2048 + 64)
    assert by_name["snapkv-gqa", "int8"]["token_budget"] > 3 * by_name["snapkv-gqa", "auto"]["token_budget"]


def test_one_policy_and_format_may_have_settings_of_its_own():
    [wide] = table(memory=8 * MIB, policy="snapkv-gqa", kv_cache="auto", window=64)
    [usual] = table(memory=8 * MIB, policy="snapkv-gqa", kv_cache="auto")
    assert (wide["token_budget"], wide["policy"]) == (usual["token_budget"], "snapkv-gqa")
    with pytest.raises(InputError, match="--set pool_kernel: --memory shows every policy"):
        table(memory=8 * MIB, pool_kernel=5)


def test_rows_without_a_memory_use_what_a_gpu_has_beside_the_weights():
    [h100, small] = plan(
        "llama3.1-8b", max_input_len=32640, policy="tova", kv_cache="auto", rows=64, gpus=["h100", "mine=1TB/s,100,24"]
    )["tables"]
    for found, name in ((h100, "H100"), (small, "mine")):
        [entry] = found["budgets"]
        chosen = {"policy": "tova", "max_input_len": 32640, "gpus": ["h100", "mine=1TB/s,100,24"]}
        place = 0 if name == "H100" else 1
        largest = [
            plan("llama3.1-8b", token_budget=entry["token_budget"] + more, **chosen)["gpus"][place]["largest_batch"]
            for more in (0, 1)
        ]
        assert largest[0]["compressed"] >= 64 > largest[1]["compressed"]
        assert list(entry["step_floor_ms"]) == [name]
    assert small["budgets"][0]["token_budget"] < h100["budgets"][0]["token_budget"]


def test_a_memory_for_the_whole_cache_says_that_nothing_need_be_compressed():
    found = table(memory=100 * MIB, policy="tova", kv_cache="auto")
    assert [(entry["compresses"], entry["token_budget"]) for entry in found] == [(False, 2112)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"memory": 1000}, r"one token's keys and values take 7\.0 KiB of each row \(kv-cache int4\)"),
        ({"memory": 200_000, "policy": "rocketkv"}, r"nothing fits: 1 row of rocketkv in kv-cache int4 takes at least"),
        ({"rows": 10**6, "policy": "full"}, r"nothing fits: 1000000 rows of full .* H200 has 118"),
        ({"rows": -3}, "rows: expected at least 1, found -3"),
        ({"memory": MIB, "compare": True}, "--compare and --memory exclude each other"),
        ({"memory": MIB, "token_budget": 64}, "--memory and --token-budget exclude each other"),
        ({"rows": 4, "mix": "mix.yaml"}, "--rows and --mix exclude each other"),
        ({"memory": MIB, "policy": "exact-topk", "backend": "onnxruntime"}, "only the reference runs it"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(asked, message):
    with pytest.raises(InputError, match=message) as error:
        table(**asked)
    assert "\n" not in str(error.value)


def test_a_memory_is_that_of_each_gpu_where_several_share_an_engine():
    asked = {"max_input_len": 32512, "memory": 1 << 30, "rows": 2, "policy": "rocketkv", "kv_cache": "auto"}
    [alone], [shared] = (plan("llama3.1-8b", **asked, **ranks)["tables"] for ranks in ({}, {"tensor_parallel": 2}))
    (one,), (half,) = alone["budgets"], shared["budgets"]
    assert half["token_budget"] > one["token_budget"]
    for entry in (one, half):
        assert entry["rows"] == (1 << 30) // entry["bytes_per_row"] == 2


def test_a_policy_of_a_build_file_may_have_settings_of_its_own(tmp_path):
    (tmp_path / "build.yaml").write_text(f"model: {SMOL}\npolicy: snapkv-gqa\nkv_cache: auto\n")
    given = {"config": tmp_path / "build.yaml", "memory": 32 * MIB, "window": 64, "max_input_len": 2048}
    [found] = plan(**given)["tables"]
    assert [entry["policy"] for entry in found["budgets"]] == ["snapkv-gqa"]
