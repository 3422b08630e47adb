from __future__ import annotations

import os
import subprocess
import sys

import pytest

FULL = "/dev/full"
pytestmark = pytest.mark.skipif(not os.path.exists(FULL), reason="the system has no disk that is always full")

COMMANDS = (["models", "--json"], ["--help"])


def shell(arguments: list[str], redirections: str) -> subprocess.CompletedProcess[str]:
    command = f'exec "$@" {redirections}'
    return subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-m", "kvc_trt", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_result_that_cannot_be_written_is_reported_in_one_line(arguments):
    done = shell(arguments, f">{FULL}")
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "error: No space left on device while writing the output",
        "hint: free some space and repeat the command",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("redirections", [f"2>{FULL}", "2>&-"])
def test_advice_that_cannot_be_written_is_lost(redirections, tiny_engine, tmp_path):
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    arguments = ["run", str(tiny_engine), "--prompt-ids", str(tmp_path / "ids.json"), "--max-new-tokens", "2"]
    done = shell(arguments, redirections)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shell(arguments, "").stdout != ""
    assert shell(["models", "--wrong"], redirections).returncode == 2


def test_closed_streams_give_their_numbers_to_no_file():
    script = "from kvc_trt.cli.process.streams import prepare_streams; prepare_streams(); import os, sys; sys.exit(f())"
    script = script.replace("f()", "min(os.open(os.devnull, 0), os.pipe()[0])")
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", script], timeout=60, check=False
    )
    assert done.returncode >= 3
    assert shell(["models"], "<&- >&-").returncode == 0
