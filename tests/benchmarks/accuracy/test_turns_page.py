"""The pages of second questions follow from the results alone, and judge no difference of few questions."""

from __future__ import annotations

import json

import pytest

from benchmarks import store
from benchmarks.accuracy import turns as accuracy_turns
from benchmarks.accuracy import turns_page as page
from kvc_trt.accuracy.grid import SECOND_QUESTION, STORED_CONTEXT
from kvc_trt.tasks.registry import task

MACHINE = {"commit": "abc", "device": "a processor", "versions": {"kvc_trt": "1", "onnxruntime": "2"}}
PLACE = {"task": "two-records", "length": 512, "framing": "plain", "dataset": "d", "max_new_tokens": 5}


def cell(policy, mode, scores, budget=128):
    of_policy = {} if budget is None else {"token_budget": budget}
    return {**PLACE, "policy": policy, "mode": mode, "row_bytes": 1, "scores": scores, **of_policy}


def result(count):
    right, wrong = [1] * count, [0] * count
    half = [place % 2 for place in range(count)]
    return {
        "machine": MACHINE,
        "settings": {"weights": "fp32", "seed": 0},
        "spent": {"processor_seconds": 1234},
        "cells": [
            cell("full", "query-aware", right, None),
            cell("full", SECOND_QUESTION, right, None),
            cell("rocketkv", "query-aware", right),
            cell("rocketkv", SECOND_QUESTION, half),
            cell("rocketkv", STORED_CONTEXT, half),
            cell("rocketkv", "query-agnostic", wrong),
            {**PLACE, "policy": "streaming-llm", "mode": SECOND_QUESTION, "token_budget": 128, "reason": "no turns"},
        ],
    }


def test_the_table_has_a_column_for_each_form_of_question():
    heading, about, table, reasons = page.measured("retrieval-tiny", result(64))
    assert heading == "## retrieval-tiny"
    assert "commit abc" in about
    assert "1,234 s" in about
    head, _, full, rocketkv, other = table.splitlines()
    forms = "one shot | turn | stored context | decode steps"
    assert head == f"| policy | budget | {forms} | turn minus one shot | stored context minus one shot |"
    assert full.startswith(
        "| `full` | - | 100.0 % (94-100; 64) | 100.0 % (94-100; 64) | n/a | n/a | +0.0 ± 0.0 | n/a |"
    )
    answered, fewer = "50.0 % (38-62; 64)", "-50.0 ± 6.3: fewer answers"
    assert rocketkv.endswith(f"| {answered} | {answered} | 0.0 % (0-6; 64) | {fewer} | {fewer} |")
    assert other.endswith("| n/a | n/a | n/a | n/a | n/a | n/a |")
    assert "`streaming-llm`, turn: no turns" in reasons


def test_too_few_questions_are_marked_as_not_judged():
    (_, _, table, _) = page.measured("retrieval-tiny", result(32))
    assert "-50.0 ± 9.0 (n 32: not judged)" in table


def test_the_summary_shows_both_models_in_one_table():
    found = {"retrieval-tiny": result(64), "smollm2-135m-instruct": result(20)}
    text = page.summary(found)
    assert "n = 64; smollm2-135m-instruct: task `two-records`" in text
    assert "| `rocketkv` | 100.0 ± 0.0 | 50.0 ± 6.3 | 100.0 ± 0.0 | 50.0 ± 11.5 |" in text


def test_the_pages_are_those_of_the_results():
    for path, text in page.texts(page.read(store.RESULTS)).items():
        assert page.MARKS.inside(path) == text, f"{path}: python -m benchmarks.accuracy.turns_page"
        assert not path.read_text(encoding="utf-8").startswith(page.MARKS.begin)


def test_a_page_without_marks_is_refused_and_left_alone(tmp_path):
    (tmp_path / "page.md").write_text("no marks")
    with pytest.raises(SystemExit, match="has no marks"):
        page.MARKS.replace(tmp_path / "page.md", "text")
    assert (tmp_path / "page.md").read_text() == "no marks"


def test_every_policy_that_engines_run_is_asked_in_one_shot_and_as_a_turn():
    for asked in accuracy_turns.MODELS.values():
        assert task(asked.task).asks_twice
        assert {"query-aware", SECOND_QUESTION, STORED_CONTEXT} <= {group.mode for group in asked.groups}
        names = [variant.policy for variant in asked.variants]
        assert {"full", "rocketkv", "rocketkv-mt", "tova"} <= set(names)
        assert not any(name.startswith("exact-topk") for name in names)


def test_a_result_is_whole_json(tmp_path, monkeypatch):
    from kvc_trt.accuracy.cell import Cell

    monkeypatch.setattr(store, "result_path", lambda name, record: tmp_path / f"{name}.json")
    monkeypatch.setattr(accuracy_turns, "record_of", lambda spent: MACHINE)
    cells = [
        Cell("two-records", "turns", "query-aware", 512, "full", None, 0, "d", 5, scores=(1.0, 0.0), row_bytes=9),
        Cell("two-records", "turns", SECOND_QUESTION, 512, "tova", 128, 0, "d", 5, reason="too small"),
    ]
    path = accuracy_turns.write_result("retrieval-tiny", {"seed": 0}, cells, {"processor_seconds": 1})
    found = json.loads(path.read_text())
    assert [one.get("scores", one.get("reason")) for one in found["cells"]] == [[1, 0], "too small"]
