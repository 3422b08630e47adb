"""Results of benchmarks name the code they came from; results of older code say so."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import re
import subprocess
import sys
from unittest.mock import MagicMock

import pytest

import benchmarks
from benchmarks import machine, store
from benchmarks.accuracy.spent import record_of, total_spent
from benchmarks.prefill import memory as prefill_memory
from tests.small_model import SMALL

MODULES = [one.name for one in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
OF_OTHER_ENVIRONMENTS = ("llama_cpp", "onnxruntime_genai", "openvino_genai", "aiohttp")
"""Packages that `make peers-env` and `make dynamo-env` install in environments of their own."""


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_every_benchmark_can_be_imported(name, monkeypatch):
    for package in OF_OTHER_ENVIRONMENTS:
        if importlib.util.find_spec(package) is None:
            monkeypatch.setitem(sys.modules, package, MagicMock())
    importlib.import_module(name)


def test_prefill_memory_finds_what_compaction_takes(monkeypatch):
    monkeypatch.setattr(prefill_memory, "MODEL", SMALL)
    monkeypatch.setattr(prefill_memory, "TOKEN_BUDGET", 64)
    found = prefill_memory.measure(512, threads=1)
    assert 0 < found["compaction_share"] < 1
    assert found["weights_bytes"] > 0


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository of one commit in place of this one."""
    (tmp_path / "code.py").write_text("a = 1\n")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "old.json").write_text("{}\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True, capture_output=True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(store, "RESULTS", results)
    monkeypatch.setattr(store, "UNCOMMITTED", results / "uncommitted")
    return tmp_path


def test_a_result_of_a_commit_is_written_beside_the_others(checkout, capsys):
    written = store.write_result("speed", {"figure": 3})
    assert written == checkout / "benchmarks" / "results" / "speed.json"
    assert re.fullmatch("[0-9a-f]{12}", json.loads(written.read_text())["machine"]["commit"])
    assert capsys.readouterr().err == ""


def test_a_result_of_changed_code_is_kept_apart_with_a_note(checkout, capsys):
    (checkout / "code.py").write_text("a = 2\n")
    written = store.write_result("speed", {"figure": 3})
    assert written == checkout / "benchmarks" / "results" / "uncommitted" / "speed.json"
    assert json.loads(written.read_text())["machine"]["commit"].endswith("-dirty")
    assert str(written) in capsys.readouterr().err


def test_a_result_has_one_record_per_line_and_is_read_as_it_was_written(tmp_path):
    runs = [{"seconds": 1.5, "steps": [1, 2]}, {"seconds": 2.0, "steps": []}]
    result = {"machine": {"device": "A"}, "points": {"one": {"runs": runs}}, "now": {"commit": "a", "runs": runs}}
    written = store.write(tmp_path / "result.json", {**result, "nothing": {}})
    assert store.read(written) == {**result, "nothing": {}}
    assert written.read_text().splitlines() == [
        "{",
        '  "machine": {"device": "A"},',
        '  "points": {',
        '    "one": {"runs": [{"seconds": 1.5, "steps": [1, 2]}, {"seconds": 2.0, "steps": []}]}',
        "  },",
        '  "now": {',
        '    "commit": "a",',
        '    "runs": [',
        '      {"seconds": 1.5, "steps": [1, 2]},',
        '      {"seconds": 2.0, "steps": []}',
        "    ]",
        "  },",
        '  "nothing": {}',
        "}",
    ]


def test_a_result_with_an_infinity_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write(tmp_path / "result.json", {"seconds": float("inf")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(store.RESULTS.glob("**/*.json")), ids=lambda path: path.name)
def test_every_committed_result_is_laid_out_by_the_one_writer(path):
    if not path.is_relative_to(store.UNCOMMITTED):
        assert path.read_text(encoding="utf-8") == store.text(store.read(path))


def test_results_of_an_earlier_benchmark_do_not_count_as_changed_code(checkout):
    (checkout / "benchmarks" / "results" / "old.json").write_text('{"new": 1}\n')
    assert not machine.commit().endswith("-dirty")


def test_outside_a_checkout_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.commit() is None


def test_every_committed_result_is_listed_with_the_code_it_came_from():
    """Every result comes from code that equals the code of its commit."""
    listed = dict(
        re.findall(r"^\| `(\S+\.json)` \|.*\| (.*) \|$", (store.RESULTS / "README.md").read_text(), re.MULTILINE)
    )
    results = {path.name: json.loads(path.read_text()) for path in store.RESULTS.glob("*.json")}
    assert listed.keys() == results.keys()
    assert not [name for name, result in results.items() if "-dirty" in result["machine"]["commit"]]


def test_accuracy_names_every_commit_that_a_cell_was_measured_at(tmp_path):
    """A run that goes on from another one keeps its cells: so it keeps its commit, and a changed tree stays one."""
    for commit in ("aaa", "bbb-dirty", "aaa", None, "ccc"):
        spent = total_spent(tmp_path, 10, 5, commit)
    assert (spent["seconds"], spent["processor_seconds"]) == (50, 25)
    assert spent["commits"] == ["aaa", "bbb-dirty", "ccc"]
    assert record_of(spent)["commit"] == "aaa, ccc, bbb-dirty"
    assert record_of({"commits": ["aaa", "ccc"]})["commit"] == "aaa, ccc"
