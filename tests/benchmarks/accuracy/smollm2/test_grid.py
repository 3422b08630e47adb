"""The grid of the real model's accuracy: the first questions, and the prompts that another engine gets."""

from __future__ import annotations

import dataclasses
import json

from benchmarks import store
from benchmarks.accuracy.kvpress import answers as kvpress
from benchmarks.accuracy.kvpress import presses
from benchmarks.accuracy.smollm2 import grid as bench
from benchmarks.accuracy.smollm2 import stages
from kvc_trt import policies
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.under_test.policy_engines import open_model

GRIDS = list(stages.CORE.values()), list(stages.REST.values())


def test_the_core_begins_with_the_policies_of_the_claims():
    first = stages.STAGES[next(iter(stages.CORE))]
    assert first.asked == 64
    assert {"rocketkv", "snapkv-gqa", "hybrid", "snapkv-gqa:pool_kernel=17"} <= set(first.policies)
    assert first.variants[0] == Variant("full", None)
    assert {group.framing for group in first.groups} == {"chat"}


def test_every_core_stage_beside_kvpress_asks_64_questions():
    assert {stage.asked for stage in stages.CORE.values() if stage.beside_kvpress} == {64}
    assert not stages.STAGES["answered"].beside_kvpress
    assert [str(one) for one in stages.STAGES["answered"].variants] == ["full"]


def test_the_core_takes_at_most_eight_hours_on_two_cores():
    assert max(map(sum, zip(*(stage.hours() for stage in stages.CORE.values()), strict=True))) <= 8
    *lines, total = stages.estimate(["needles", "pools"]).splitlines()
    assert lines == ["needles: 0.2 h of our engines, 0.2 h of kvpress", "pools: 0.0 h of our engines, 0.0 h of kvpress"]
    assert total == "together, a core each: 0.2 h (0.2 and 0.2)"


def test_policies_left_out_of_later_core_stages_are_asked_elsewhere():
    assert set(stages.LATER) | set(stages.LEFT_OUT) == set(stages.CLAIMED)
    core, rest = ({(g, v) for stage in some for g in stage.groups for v in stage.variants} for some in GRIDS)
    for name in stages.LEFT_OUT:
        assert {group.mode for group, variant in core if variant.policy == name} == set(stages.MODES)
    assert {group for group, _ in core if group.length < 8192} <= {g for g, v in core | rest if v.policy == "snapkv"}


def test_every_policy_with_an_engine_and_both_framings_are_in_the_whole_grid():
    asked = {variant.name for stage in stages.STAGES.values() for variant in stage.variants}
    assert asked == {one.name for one in policies.describe() if not policies.named(one.name).selection.oracle}
    groups = {group for stage in stages.STAGES.values() for group in stage.groups}
    assert {group.length for group in groups} == {2048, 4096, 8192}
    assert {(group.mode, group.framing) for group in groups if group.task == "log-summary"} == {
        (mode, framing) for mode in stages.MODES for framing in ("plain", "chat")
    }


def test_questions_are_written_with_the_bytes_that_rocketkv_stores(tmp_path, monkeypatch):
    stage = stages.Stage(("associative-recall",), (256,), ("plain",), modes=("query-aware",), asked=2)
    alone = dataclasses.replace(stage, lengths=(512,), policies=())
    monkeypatch.setattr(bench, "STAGES", {"one": stage, "whole cache alone": alone})
    monkeypatch.setattr(bench, "BUDGETS", (64,))
    with open_model("retrieval-tiny") as model:
        found = json.loads(bench.write_questions(model, ["one", "whole cache alone"], tmp_path).read_text())
        (group,) = found["groups"]
        assert found["bytes_per_token"] * 64 < group["row_bytes"]["64"]
    assert (group["asked"], len(group["questions"]), group["mode"]) == (2, 2, "query-aware")
    assert group["questions"][0]["prompt"]


def test_a_point_keeps_what_budget_bytes_and_ratio_leave_of_a_prompt():
    group = {"output_tokens": 12, "row_bytes": {"128": 1000 * 10}}
    points = {point.label: point.kept for point in kvpress.points_of(group, 2000, 10)}
    assert points == {
        "full": 2000, "budget 128": 116, "bytes of rocketkv 128": 988,
        "ratio 0.25": 1500, "ratio 0.5": 1000, "ratio 0.75": 500, "ratio 0.875": 250,
    }  # fmt: skip
    for kept in (65, 988, 1999):
        assert int(2000 * (1 - presses.ratio_for(kept, 2000))) == kept


def test_amounts_share_a_prefill_up_to_the_memory_limit(monkeypatch):
    monkeypatch.setattr(kvpress, "HELD_TOKENS", 100)
    assert kvpress.held_together([10, 40, 50, 60, 40, 120]) == [[10, 40, 50], [60, 40], [120]]
    assert kvpress.held_together([]) == []


def line_of(index, **changes):
    place = {"task": "t", "mode": "m", "length": 9, "framing": "chat", "dataset": "d", "output_tokens": 12}
    points = [{"press": "knorm", "label": "ratio 0.5", "kept": 1000 + index, "score": index}]
    return {**place, "index": index, "points": points, "seconds": 1.0, "commit": "abc", **changes}


def test_a_line_that_a_stopped_run_cut_short_is_asked_again(tmp_path):
    kept = tmp_path / "lines.jsonl"
    assert kvpress.lines_of(kept) == []
    kept.write_text(json.dumps(line_of(0)) + "\n" + json.dumps(line_of(1))[:-9])
    assert kvpress.lines_of(kept) == [line_of(0)]
    with kept.open("a") as file:
        file.write(json.dumps(line_of(1)) + "\n")
    assert kvpress.lines_of(kept) == [line_of(0), line_of(1)]


def test_answers_of_another_checkpoint_or_version_are_kept_apart(monkeypatch):
    monkeypatch.setattr(kvpress.metadata, "version", lambda name: "0.5.5")
    first, second = (kvpress.lines_path({"settings": {"checkpoint": one * 64}}) for one in "ab")
    assert first.name == f"kvpress-0.5.5-{'a' * 12}.jsonl"
    assert first != second


def test_answers_stay_in_the_result_when_fewer_stages_are_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(kvpress.metadata, "version", lambda name: "0.5.5")
    monkeypatch.setattr(store, "result_path", lambda name, record: tmp_path / name)
    asked = {"settings": {"checkpoint": "c"}, "bytes_per_token": 10, "groups": []}
    path = kvpress.write_result(asked, [line_of(1), line_of(0), line_of(0, mode="other")])
    first, second = json.loads(path.read_text())["cells"]
    assert (first["kept"], first["scores"], first["output_tokens"]) == ([1000, 1001], [0, 1], 12)
    assert second["mode"] == "other"
