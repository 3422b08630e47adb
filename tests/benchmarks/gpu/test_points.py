"""Results that are written point by point."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import machine, store
from benchmarks.gpu import points
from benchmarks.gpu.emulated import NOTE, EmulatedGpu
from benchmarks.gpu.points import Results

SWEEP = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from benchmarks import store
from benchmarks.gpu.emulated import EmulatedGpu
from benchmarks.gpu.points import Results

store.EMULATED = Path(sys.argv[1])
results = Results("sweep", {}, EmulatedGpu(None), resume="--resume" in sys.argv, seconds=1)
ending = {"hang": lambda: time.sleep(30), "crash": os.abort, "leave": dict, "after": dict}
results.measure("results", [({"name": name}, ending[name]) for name in ("leave", sys.argv[2], "after")])
sys.exit(results.status)
"""


class Gpu(EmulatedGpu):
    """A GPU that can be lost."""

    emulated = False
    lost = False

    def __init__(self):
        super().__init__(SimpleNamespace(path=None))

    def usable(self):
        return not self.lost

    def publishable(self, figures):
        return dict(figures)


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    monkeypatch.setattr(store, "UNCOMMITTED", tmp_path)
    monkeypatch.setattr(store, "EMULATED", tmp_path / "emulated")
    return Gpu()


def results(gpu, *, resume=False):
    return Results("sweep", {"dtype": "bfloat16"}, gpu, resume=resume, seconds=60)


def failing():
    raise ValueError("no kernel for this\nwith more lines")


def written(found):
    return json.loads(found.path.read_text())


def test_a_point_that_fails_is_an_entry_and_the_next_one_is_measured(gpu, capsys):
    found = results(gpu)
    found.measure("results", [({"name": "a"}, failing), ({"name": "b", "batch": 8}, lambda: {"us": 3.0})], str)
    assert found.status == points.FAILED
    document = written(found)
    assert document["results"] == [
        {"name": "a", "failed": "ValueError: no kernel for this"},
        {"name": "b", "batch": 8, "us": 3.0},
    ]
    assert (document["dtype"], "commit" in document["machine"]) == ("bfloat16", True)
    said, other = capsys.readouterr().out.splitlines()
    assert said == "a: failed: ValueError: no kernel for this"
    assert other.startswith("b batch 8: {'name': 'b'")


def test_an_unmeasured_point_does_not_fail_the_run(gpu):
    found = results(gpu)
    found.measure("results", [({"name": "a"}, lambda: {"not_measured": "not installed"})])
    assert found.status == 0


def test_while_a_point_runs_its_entry_says_that_it_did_not_end(gpu):
    found = results(gpu)
    seen = []
    found.measure("results", [({"name": "a"}, lambda: seen.append(written(found)) or {})])
    assert seen[0]["results"] == [{"name": "a", "failed": "the process ended within this point"}]
    assert written(found)["results"] == [{"name": "a"}]


def test_a_lost_gpu_ends_the_process_and_another_goes_on_behind_the_point(gpu):
    sweep = [({"name": "a"}, lambda: {"us": 1.0}), ({"name": "b"}, failing), ({"name": "c"}, lambda: {"us": 2.0})]
    gpu.lost = True
    with pytest.raises(SystemExit) as ended:
        results(gpu).measure("results", sweep[1:])
    assert ended.value.code == points.GO_ON
    gpu.lost = False
    found = results(gpu, resume=True)
    found.measure("results", sweep[1:])
    assert [entry["name"] for entry in written(found)["results"]] == ["b", "c"]
    assert found.status == points.FAILED


def test_results_of_another_sweep_are_not_gone_on_with(gpu, capsys):
    results(gpu).measure("results", [({"name": "a"}, dict)])
    with pytest.raises(SystemExit) as ended:
        results(gpu, resume=True).measure("results", [({"name": "b"}, dict)])
    assert ended.value.code == points.OTHER_RESULTS
    assert "entry 0 of results is not b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "said"), [("hang", "it did not return within 1 s"), ("crash", "the process ended within this point")]
)
@pytest.mark.slow
def test_a_point_that_ends_the_process_is_an_entry(tmp_path, how, said):
    def run(*more):
        command = [sys.executable, "-c", SWEEP, str(tmp_path), how, *more]
        return subprocess.run(command, cwd=machine.ROOT, capture_output=True, check=False).returncode

    assert run() == (points.GO_ON if how == "hang" else -6)
    assert run("--resume") == points.FAILED
    document = json.loads((tmp_path / "sweep-emulated.json").read_text())
    assert document["results"] == [{"name": "leave"}, {"name": how, "failed": said}, {"name": "after"}]


def test_no_emulated_time_can_be_written(gpu):
    emulated = EmulatedGpu(SimpleNamespace(path=machine.ROOT / "libkvc_emulation.so"))
    calls = []
    timing = emulated.measure([lambda: calls.append(1)], samples=3)
    assert calls == [1, 1]
    found = results(emulated)
    assert found.path.name == "sweep-emulated.json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        found.measure("results", [({"name": "a"}, lambda: {"median_us": timing.median_us})])
    assert emulated.publishable({"median_us": 1.0}) == {"not_measured": NOTE}
    assert emulated.record()["gpu"] is None
