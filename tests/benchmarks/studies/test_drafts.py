"""Drafts over length: prompts have their length, and the page is that of its records."""

from __future__ import annotations

import pytest

from benchmarks.studies.drafts import measure
from benchmarks.studies.drafts.measure import PLAIN, SIDES, SPECULATING, TASKS, asked
from benchmarks.studies.drafts.page import page
from benchmarks.studies.records import Records
from benchmarks.studies.study import Run
from kvc_trt.accuracy.under_test.policy_engines import choose


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    kept = Records(tmp_path_factory.mktemp("studies") / "drafts.jsonl", {
        "commit": "abc", "device": "a processor", "versions": {"kvc_trt": "0", "onnxruntime": "0", "torch": "0"},
    })  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LENGTHS": {False: (480,), True: (480,)}, "TOKENS": 24, "WARM_UP": 2}.items():
            patch.setattr(measure, name, value)
        patch.setattr(measure, "SIDES", {"snapkv": "snapkv:prompt_budget=128", "full": "full"})
        measure.measure(Run("retrieval-text", count=1), kept)
    return kept.all


def test_a_prompt_and_its_answer_fill_the_wanted_length():
    chosen = choose("retrieval-text", weights="fp32")
    for task in TASKS:
        prompt = asked(chosen, task, 1, 600)
        assert 590 <= len(prompt) + measure.TOKENS <= 600


def test_both_ways_are_measured_from_the_first_token_on(records):
    assert [one["key"]["task"] for one in records] == list(TASKS)
    for one in records:
        for side in SIDES:
            found = one["measured"][side]
            assert found["same_tokens"] == 24
            assert found[PLAIN]["passes"] == 0 < found[PLAIN]["processor_seconds"]
            assert found[SPECULATING]["accepted"] <= found[SPECULATING]["drafted"]


def test_the_page_begins_with_what_the_paper_says_and_has_its_plot(records):
    written = page(records)
    rows = [line for line in written.text.splitlines() if line.startswith("| ") and "| **" in line]
    assert len(rows) == 2
    assert "have to be trained" in written.text
    ((path, content),) = written.images.items()
    assert content.startswith(b"\x89PNG")
    assert f"/studies/{path.name})" in written.text
