"""The committed results of the real model's accuracy become the files from which its grid goes on."""

from __future__ import annotations

import json

import pytest

from benchmarks import store
from benchmarks.accuracy.kvpress import answers as kvpress
from benchmarks.accuracy.smollm2 import grid as bench
from benchmarks.accuracy.smollm2 import resume
from kvc_trt.accuracy.results import Results
from kvc_trt.tasks.dataset import VERSION


def result(name):
    return json.loads((store.RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def test_our_cells_are_restored_from_a_result(tmp_path):
    before = result(bench.NAME)
    path = resume.restore_ours(before, tmp_path)
    with Results(path, {**before["settings"], "tasks_version": VERSION}) as results:
        cells = list(results.cells.values())
    after = json.loads(json.dumps([bench.compact(cell.to_json()) for cell in cells]))
    figures = ("accuracy", "negative_log_likelihood", "standard_error")  # of the scores, which are compared
    for ours, cell in zip(after, before["cells"], strict=True):
        assert {name: ours.get(name) for name in ours.keys() | cell.keys() if name not in figures} == {
            name: value for name, value in cell.items() if name not in figures
        }
    assert json.loads((tmp_path / "spent.json").read_text()) == before["spent"]


def test_kvpress_answers_are_restored_from_a_result(tmp_path, monkeypatch):
    before = result(kvpress.NAME)
    monkeypatch.setattr(kvpress.metadata, "version", lambda name: before["machine"]["versions"]["kvpress"])
    monkeypatch.setattr(store, "result_path", lambda name, record: tmp_path / name)
    path = resume.restore_kvpress(before, tmp_path)
    assert path.name == kvpress.lines_path(before).name
    written = json.loads(kvpress.write_result(before, kvpress.lines_of(path)).read_text())
    assert written["cells"] == before["cells"]
    assert written["seconds"] == pytest.approx(before["seconds"], rel=0.01)


def test_restoring_leaves_existing_files_alone(tmp_path):
    for name, restore in ((bench.NAME, resume.restore_ours), (kvpress.NAME, resume.restore_kvpress)):
        path = restore(result(name), tmp_path)
        path.write_text("mine")
        assert restore(result(name), tmp_path).read_text() == "mine"
