"""Records of studies are lines that a later run goes on from, and pages are those of their records."""

from __future__ import annotations

import json

import pytest

from benchmarks import store
from benchmarks.studies.__main__ import STUDIES
from benchmarks.studies.findings import Estimate, Finding, overview, verdict
from benchmarks.studies.records import FOLDER, Records, of_kind, recorded
from benchmarks.studies.study import Run, measure_lacking
from benchmarks.studies.two_stages import long_prompts


def test_a_measurement_is_one_line_with_its_machine_and_is_not_made_again(tmp_path):
    path = tmp_path / "one.jsonl"
    kept = Records(path, {"commit": "abc"})
    kept.add({"part": "a", "index": 0}, {"value": 1 / 3, "none": float("nan"), "rows": [(0.12345, 2)]})
    kept.add({"part": "b", "index": 0}, {"value": 2})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["measured"] == {"value": 0.3333, "none": None, "rows": [[0.1235, 2]]}
    assert {one["machine"]["commit"] for one in lines} == {"abc"}
    again = Records(path, {"commit": "def"})
    assert not again.lacks({"index": 0, "part": "a"})
    assert again.lacks({"part": "a", "index": 1})
    again.add({"part": "a", "index": 1}, {})
    assert [one["machine"]["commit"] for one in again.all] == ["abc", "abc", "def"]
    assert len(of_kind(again.all, part="a")) == 2


def test_verdict_depends_on_point_and_interval():
    assert verdict(True, True) == "holds"
    assert verdict(True, False) == "holds in part"
    assert verdict(False, False) == "does not hold here"


def test_an_estimate_has_its_mean_within_its_interval():
    found = Estimate.of([0.1, 0.2, 0.6])
    assert found.mean == pytest.approx(0.3)
    assert 0.1 <= found.low <= found.mean <= found.high <= 0.6
    assert found.count == 3


def test_few_prompts_are_named_as_few():
    shown = overview([Finding("a claim", "a figure", 4, "holds"), Finding("b", "c", 40, "holds")])
    assert "verdicts are preliminary" in shown
    assert "| 4 | **holds**, preliminary |" in shown
    assert "| 40 | **holds** |" in shown
    assert "preliminary" not in overview([Finding("a claim", "a figure", 20, "holds")])


EVERY = (*STUDIES.values(), long_prompts.STUDY)
MEASURED = [one for one in EVERY if (store.RESULTS / FOLDER / one.name).with_suffix(".jsonl").exists()]


@pytest.mark.parametrize("study", MEASURED, ids=[one.name for one in MEASURED])
def test_committed_pages_are_those_of_the_committed_records(study):
    records = recorded(study.name)
    written = study.page(records)
    assert study.path.read_text() == written.text
    assert all(path.exists() for path in written.images)
    assert not [one for one in records if "-dirty" in one["machine"]["commit"]]


def test_every_file_of_records_is_of_a_study():
    assert {path.stem for path in (store.RESULTS / FOLDER).glob("*")} == {one.name for one in MEASURED}


def test_every_page_of_a_study_has_records():
    pages = set(STUDIES["pooling"].path.parent.glob("*.md"))
    assert pages == {one.path for one in MEASURED}


def test_a_run_measures_what_is_lacking_while_it_has_time(tmp_path):
    kept, keys, asked = Records(tmp_path / "one.jsonl", {"commit": "abc"}), [{"index": at} for at in range(3)], []
    kept.add(keys[1], {})

    def of_key(key):
        asked.append(key["index"])
        return {}

    measure_lacking(Run(until=0.0), kept, keys, of_key)
    assert asked == []
    measure_lacking(Run(), kept, keys, of_key)
    assert asked == [0, 2]
