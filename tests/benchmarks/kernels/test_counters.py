"""The output of Nsight Compute is parsed; the tool itself needs a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.kernels import counters
from benchmarks.kernels.sweep import SweepPoint

STEP = SweepPoint("rocketkv", 8, 32768, 1024)
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def row(number, kernel, metric, value):
    return (
        f'"{number}","7","python3","127.0.0.1","{kernel}","1","7","(256, 1, 1)","(8, 4, 1)","0","9.0",'
        f'"Command line profiler metrics","{metric}","","{value}"'
    )


LOG = "\n".join((
    "==PROF== Connected to process 7",
    "==PROF== Disconnected from process 7",
    HEADER,
    row(0, "page_scores", "gpu__time_duration.sum", "4,512"),
    row(0, "page_scores", "dram__bytes_read.sum", "1,048,576"),
    row(1, "select_tokens", "gpu__time_duration.sum", "3200"),
    row(1, "select_tokens", "launch__registers_per_thread", "40"),
))  # fmt: skip


def test_each_launch_has_its_counters_under_names_with_units():
    assert counters.read(LOG) == [
        {"kernel": "page_scores", "grid": "(8, 4, 1)", "block": "(256, 1, 1)", "nanoseconds": 4512.0,
         "bytes_read": 1048576.0},
        {"kernel": "select_tokens", "grid": "(8, 4, 1)", "block": "(256, 1, 1)", "nanoseconds": 3200.0,
         "registers_per_thread": 40.0},
    ]  # fmt: skip
    assert "page_scores 4.5 us under ncu" in counters.line({"kernels": counters.read(LOG)})


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "==ERROR== ERR_NVGPUCTRPERM - no permission"),
        ("==PROF== Connected\n", "ncu ended with 9: no such device"),
    ],
)
def test_a_failure_of_ncu_is_recorded_as_the_reason(monkeypatch, log, said):
    def run(command, **options):
        Path(command[command.index("--log-file") + 1]).write_text(log)
        return subprocess.CompletedProcess(command, 9, "", "warning\nno such device\n")

    monkeypatch.setattr(counters, "ncu", lambda: "/opt/ncu")
    monkeypatch.setattr(subprocess, "run", run)
    assert counters.counted(STEP, 60) == {"not_measured": said}


def test_without_ncu_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(counters, "ncu", lambda: None)
    assert "not installed" in counters.counted(STEP, 60)["not_measured"]


def test_the_clocks_are_left_alone_and_one_step_is_counted():
    command = counters.command("ncu", Path("log.csv"), STEP)
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--profile-from-start") + 1] == "off"
    assert command[-2:] == ["--step", str(STEP)]
