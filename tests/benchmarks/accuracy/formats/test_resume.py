"""The committed answers of caches in formats become the file from which `answers` goes on."""

from __future__ import annotations

import json
from types import SimpleNamespace

from benchmarks import store
from benchmarks.accuracy.formats import answers, resume
from benchmarks.accuracy.smollm2.stages import LONGEST_ANSWERS


def test_asking_goes_on_from_what_was_committed(tmp_path, monkeypatch):
    before = json.loads(store.recorded_path(answers.NAME).read_text(encoding="utf-8"))
    resume.restored(before, tmp_path)
    known = before["settings"]
    model = SimpleNamespace(describe=lambda: {name: known[name] for name in resume.DESCRIBED})
    monkeypatch.setattr(answers, "FOLDER", tmp_path)
    draw = answers.OneDraw(known["samples"], known["seed"], LONGEST_ANSWERS)
    cells = answers.measured(model, [], draw, None)
    assert [(cell.policy, cell.token_budget, list(cell.scores)) for cell in cells] == [
        (cell["policy"], cell.get("token_budget"), cell["scores"]) for cell in before["cells"]
    ]
