"""The times of steps are compared round by round, and every row that the page shows has one."""

from __future__ import annotations

from benchmarks import store
from benchmarks.accuracy.smollm2 import steps
from benchmarks.accuracy.smollm2.choices import WHOLE, Row, shown
from benchmarks.accuracy.smollm2.page import recorded
from kvc_trt.accuracy.grid import Variant

TOVA = Row(Variant("tova", 128), 2048, 12)


def _record(row: Row, rounds: list[float]) -> dict[str, object]:
    return {
        "policy": row.variant.policy, "token_budget": row.variant.token_budget, "max_input_len": row.length,
        "max_output_len": row.answer, "median_ms": 1.0, "rounds_ms": rounds,
    }  # fmt: skip


def test_a_slow_round_slows_both_sides_and_not_the_ratio() -> None:
    whole = Row(WHOLE, 2048, 12)
    found = steps.Steps.read({"steps": [_record(whole, [6.0, 60.0, 6.0]), _record(TOVA, [3.0, 30.0, 2.0])]})
    assert found.ratio(TOVA) == steps.Ratio(2.0, 2.0, 2.5)
    assert found.ratio(whole) == steps.Ratio(1.0, 1.0, 1.0)


def test_every_row_of_the_page_was_timed_in_the_same_rounds() -> None:
    found = steps.Steps.read(store.recorded(steps.NAME, steps.COMMAND))
    assert list(found.by_row.keys() ^ set(shown(recorded()))) == []
    assert {len(one["rounds_ms"]) for one in found.by_row.values()} == {found.result["rounds"]}
    for one in found.by_row.values():
        assert one["samples"] == found.result["rounds"] * found.result["steps_of_a_round"]
        assert min(one["rounds_ms"]) <= one["median_ms"] <= max(one["rounds_ms"])
