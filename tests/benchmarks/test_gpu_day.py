"""The script of a GPU's day, with stand-ins for every program it calls: its parts, their order, limits and results.

tests/benchmarks/test_gpu_bundle.py runs the script with a stand-in for the GPU alone.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_day.sh"
STAND_IN = """#!/bin/sh
case "$*" in
*cuda.is_available*) exit ${NO_GPU:-0} ;;
*"import pytest"*) exit ${NO_IMPORT:-0} ;;
*"import xdist"*) exit ${NO_XDIST:-0} ;;
esac
echo "$(basename "$0") $* [$KVC_TRT_KERNELS]" >>"$CALLS"
case "$*" in
*${SLOW:-nothing}*) sleep 20 ;;
*--resume*) ;;
*${LOST:-nothing}*) exit 75 ;;
*${CRASH:-nothing}*) kill -SEGV $$ ;;
*${BAD:-nothing}*) exit 1 ;;
esac
"""
PARTS = (
    "cmake -S . -B", "cmake --build", "python -m pytest -m gpu -q -n ", "python -m benchmarks.torch.engine",
    "python -m benchmarks.kernels --batches", "python -m benchmarks.torch.backend --seconds",
    "python -m benchmarks.kernels.counters", "compute-sanitizer --tool memcheck", "compute-sanitizer --tool racecheck",
    "compute-sanitizer --tool synccheck",
)  # fmt: skip


@pytest.fixture
def day(tmp_path):
    """day(*parts, **environment) -> (exit status, the calls made, standard error), in a tree of its own."""
    for name in ("python", "cmake", "compute-sanitizer"):
        path = tmp_path / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
    tree = tmp_path / "tree"
    (tree / "benchmarks").mkdir(parents=True)
    (tree / "benchmarks" / "gpu_day.sh").symlink_to(SCRIPT)

    def run(*parts, **environment):
        calls = tmp_path / "calls"
        calls.write_text("")
        settings = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls), "PY": "python"}
        done = subprocess.run(
            ["sh", str(tree / "benchmarks" / "gpu_day.sh"), *parts], env={**settings, **environment},
            capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
        )  # fmt: skip
        return done.returncode, calls.read_text().splitlines(), done.stderr

    return run


def test_the_gpu_day_runs_every_part_in_order(day, tmp_path):
    status, calls, _ = day()
    assert status == 0
    assert [call[: len(part)] for call, part in zip(calls, PARTS, strict=True)] == list(PARTS)
    assert all(call.endswith(f"[{tmp_path}/tree/build/libkvc_kernels.so]") for call in calls)


def test_parts_can_be_chosen_and_a_failure_does_not_end_the_day(day):
    status, calls, _ = day("compare", "engine", BAD="pytest", NO_XDIST="1")
    assert status == 1
    assert [call.split()[2] for call in calls] == ["pytest", "benchmarks.torch.engine"]
    assert " -n " not in calls[0]


@pytest.mark.parametrize("wrong", ["everything", "--emulate"])
def test_unknown_stages_are_refused_before_anything_runs(day, wrong):
    status, calls, told = day(wrong)
    assert (status, calls) == (2, [])
    assert "expected " in told


def test_stages_without_time_are_reported(day):
    status, calls, told = day("kernels", "engine", SLOW="benchmarks.kernels", LIMIT="2")
    assert status == 1
    assert len(calls) == 1
    assert "stopped: timings of the kernels: its time is over" in told
    assert "not run: an engine on the torch backend: its time is over" in told


def test_a_part_that_takes_too_long_leaves_the_others_their_time(day):
    status, calls, told = day("kernels", "engine", SLOW="benchmarks.kernels", PART_LIMIT="2")
    assert status == 1
    assert [call.split()[2] for call in calls] == ["benchmarks.kernels", "benchmarks.torch.engine"]
    assert "stopped: timings of the kernels" in told


@pytest.mark.parametrize("how", ["LOST", "CRASH"])
def test_a_sweep_whose_process_ended_goes_on_behind_the_point(day, how):
    status, calls, _ = day("kernels", "engine", **{how: "benchmarks.kernels"})
    assert status == 1
    assert ["--resume" in call for call in calls] == [False, True, False]


def test_results_are_copied_after_each_part(day, tmp_path):
    old = tmp_path / "tree" / "benchmarks" / "results" / "old.json"
    old.parent.mkdir()
    old.write_text("{}")
    python = tmp_path / "python"
    python.write_text(f"{STAND_IN}echo new >{old.parent}/kernels.json\n")
    status, _, _ = day("--out", "there", "kernels")
    assert status == 0
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["kernels.json"]


def test_without_a_gpu_nothing_is_called(day):
    status, calls, told = day(NO_GPU="1")
    assert (status, calls) == (3, [])
    assert told == "error: no GPU: nothing was built, compared or timed\n"


def test_missing_imports_are_found_before_the_gpu(day):
    status, calls, told = day(NO_IMPORT="1", NO_GPU="1")
    assert (status, calls) == (3, [])
    assert "cannot import what the parts need" in told


def test_emulated_kernels_are_named_in_every_call_that_could_be_taken_for_a_measurement(day):
    status, calls, _ = day("--emulated", "library.so", NO_GPU="1")
    assert status == 0
    assert all(call.endswith("/library.so]") for call in calls)
    sweeps = [call for call in calls if "benchmarks." in call]
    assert len(sweeps) == 4
    assert all(" --emulated " in call for call in sweeps)
    assert not [call for call in calls if call.startswith(("cmake", "compute-sanitizer"))]
