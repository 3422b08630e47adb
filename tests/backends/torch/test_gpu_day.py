"""The script of a GPU's day, with stand-ins for all that it calls: its parts, their order, and its limit of time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_day.sh"
STAND_IN = """#!/bin/sh
case "$*" in
*cuda.is_available*) exit ${NO_GPU:-0} ;;
esac
echo "$(basename "$0") $* [$KVC_TRT_KERNELS]" >>"$CALLS"
case "$*" in
*${SLOW:-nothing}*) sleep 20 ;;
*${BAD:-nothing}*) exit 1 ;;
esac
"""
PARTS = (
    "cmake -S . -B out", "cmake --build out", "python -m pytest -m gpu -q ", "python -m benchmarks.torch_engine",
    "python -m benchmarks.kernels", "python -m benchmarks.torch_backend --seconds",
    "compute-sanitizer --tool memcheck", "compute-sanitizer --tool racecheck", "compute-sanitizer --tool synccheck",
)  # fmt: skip


@pytest.fixture
def day(tmp_path):
    """day(*parts, **environment) -> (exit status, the calls made, standard error)."""
    for name in ("python", "cmake", "compute-sanitizer"):
        path = tmp_path / name
        path.write_text(STAND_IN)
        path.chmod(0o755)

    def run(*parts, **environment):
        calls = tmp_path / "calls"
        calls.write_text("")
        settings = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls), "BUILD": "out"}
        done = subprocess.run(
            ["sh", str(SCRIPT), *parts], env={**settings, **environment}, capture_output=True, text=True, timeout=60
        )
        return done.returncode, calls.read_text().splitlines(), done.stderr

    return run


def test_one_call_does_everything_in_order(day):
    status, calls, _ = day()
    assert status == 0
    assert [call[: len(part)] for call, part in zip(calls, PARTS, strict=True)] == list(PARTS)
    library = SCRIPT.parents[1] / "out" / "libkvc_kernels.so"
    assert all(call.endswith(f"[{library}]") for call in calls)


def test_parts_can_be_chosen_and_a_failure_does_not_end_the_day(day):
    status, calls, _ = day("compare", "engine", BAD="pytest")
    assert status == 1
    assert [call.split()[2] for call in calls] == ["pytest", "benchmarks.torch_engine"]
    status, _, told = day("everything")
    assert (status, told.count("expected build compare engine kernels torch sanitize")) == (2, 1)


def test_what_the_time_does_not_suffice_for_is_said(day):
    status, calls, told = day("kernels", "engine", SLOW="benchmarks.kernels", LIMIT="2")
    assert status == 1
    assert len(calls) == 1
    assert "stopped: timings of the kernels: 2 s are over" in told
    assert "not run: an engine on the torch backend: 2 s are over" in told


def test_without_a_gpu_nothing_is_called(day):
    status, calls, told = day(NO_GPU="1")
    assert (status, calls) == (3, [])
    assert told == "error: no GPU: nothing was built, compared or timed\n"
