"""Sentences follow from figures."""

from __future__ import annotations

import copy

import pytest

from kvc_trt.profile.pages.findings import findings

ROW = {
    "context": 1024,
    "batch_size": 1,
    "side": "engine",
    "speedup_over_dense": 2.0,
    "ceiling_speedup": 3.0,
    "percent_of_floor": 60.0,
    "bytes_read_per_step_modelled": 10**9,
    "compaction_share_of_prefill": 0.05,
    "compaction_ms": 5.0,
    "median_ttft_ms": 100.0,
    "std_ttft_ms": 0.1,
    "prefill_minus_dense_ms": 6.0,
    "noise_percent": 3.0,
}
QUIET = {
    "engine": {"backend": "onnxruntime", "policy": {"policy": "hybrid"}},
    "machine": {},
    "rows": [ROW],
    "floor": {"copy_bandwidth": {"last_level_cache_bytes": 10**6, "beyond_cache": True, "drift_percent": 1.0}},
    "memory": {"rows": [], "decode": []},
    "left_out": [],
}
MEMORY = {"context": 1024, "batch_size": 1, "side": "engine", "kind": "cache", "modelled_bytes": 100 << 20}


def test_a_quiet_result_says_speed_and_floor_only():
    assert findings(QUIET) == [
        "decode is 2.00x as fast as dense at 1,024 tokens, batch 1; its traffic allows 3.00x",
        "a step reaches 60% (1,024 tokens, batch 1) of the copy-bandwidth floor",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"speedup_over_dense": 0.8}, "slower than dense in 1 of 1 rows: 0.80x at 1,024 tokens, batch 1"),
        ({"speedup_over_dense": 3.5}, "the dense side ran further below its own floor"),
        ({"bytes_read_per_step_modelled": 10}, "would fit the last-level cache"),
        ({"compaction_share_of_prefill": 0.2}, "compaction takes 20% of prefill"),
        (
            {"prefill_minus_dense_ms": 40.0},
            "5.0 ms by its nodes, but the time to the first token is 40.0 ms longer than the dense",
        ),
        ({"noise_percent": 50.0}, "1 of 1 rows vary by more than 20%"),
    ],
)
def test_each_unusual_row_has_its_finding(change, expected):
    assert any(expected in sentence for sentence in findings({**QUIET, "rows": [{**ROW, **change}]}))


@pytest.mark.parametrize(
    ("kind", "measured", "told"),
    [
        ("cache", 105 << 20, False),
        ("cache", 115 << 20, True),
        ("prefill", 115 << 20, False),
        ("prefill", 140 << 20, True),
    ],
)
def test_memory_more_than_a_tenth_off_the_model_is_a_finding(kind, measured, told):
    percent = 100 * (measured / MEMORY["modelled_bytes"] - 1)
    line = {**MEMORY, "kind": kind, "measured_bytes": measured, "difference_percent": percent}
    found = findings({**QUIET, "memory": {"rows": [line], "decode": []}})
    assert any(f"memory, {kind}" in sentence for sentence in found) is told


@pytest.mark.parametrize("told", [True, False])
def test_the_peak_of_decode_is_a_finding_where_the_twins_exceeds_noise(told):
    peak = {
        "context": 1024, "batch_size": 1, "side": "engine", "peak_bytes": (100 << 20) if told else (5 << 20),
        "peak_share_of_dense": 0.4, "peak_with_weights_share_of_dense": 0.9, "state_modelled_share_of_dense": 0.35,
        "with_weights_modelled_share_of_dense": 0.85,
    }  # fmt: skip
    found = findings({**QUIET, "memory": {"rows": [], "decode": [peak]}})
    sentence = (
        "decode at 1,024 tokens, batch 1 needs 100.0 MiB beside the weights, 40% of its dense twin's 250.0 MiB "
        "(modelled: 35%); with the weights 90% (modelled: 85%)"
    )
    assert (sentence in found) is told
    assert any("beside the weights" in one for one in found) is told


@pytest.mark.parametrize(("selection", "advised"), [("hybrid", True), ("quest", True), ("streaming-llm", False)])
def test_only_policies_that_read_a_part_are_advised_to_read_all(selection, advised):
    engine = {"backend": "onnxruntime", "policy": {"policy": selection}}
    found = findings({**QUIET, "engine": engine, "rows": [{**ROW, "speedup_over_dense": 0.8}]})
    assert any("slower than dense" in sentence for sentence in found)
    assert any("--dense-until auto" in sentence for sentence in found) is advised


def test_the_stand_in_for_a_gpu_is_reported_first():
    machine = {"stands_in": "the CPU, in float32 around the reference operators"}
    row = {**ROW, "speedup_over_dense": 0.8}
    found = findings({**QUIET, "machine": machine, "engine": {"backend": "torch"}, "rows": [row]})
    assert found[0] == f"measured on {machine['stands_in']}: this is slow, and no figure here is one of a GPU"
    assert not any("--dense-until" in sentence for sentence in found), "a GPU may break even elsewhere"


def test_limits_of_the_measurement_are_findings():
    result = copy.deepcopy(QUIET)
    result["floor"]["copy_bandwidth"].update(beyond_cache=False, drift_percent=30.0)
    result["left_out"] = ["context 9: too long"]
    found = findings(result)
    assert "context 9: too long" in found
    assert any("changed by 30%" in sentence for sentence in found)
    assert any("the floor is too low" in sentence for sentence in found)


def test_without_a_dense_twin_nothing_is_compared():
    row = {**ROW, "speedup_over_dense": None, "prefill_minus_dense_ms": None, "compaction_share_of_prefill": None}
    assert not any("dense" in sentence for sentence in findings({**QUIET, "rows": [row]}))
