"""A rank that dies or fails ends the others with one line; nothing hangs, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvc_trt.backends.torch.parallel.group import RankError, RankGroup
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.kernels import loading
from tests.backends.prompts import padded, prompts
from tests.kernels.double import compile_double

pytestmark = pytest.mark.slow

SECONDS = 120.0
"""Seconds for all processes to end, on a machine that is busy with other work too. A rank that waits in a sum would
give up after 600."""
ONE = np.zeros(1, np.int64)


def gone(ids, seconds=SECONDS):
    """True if all processes end in time, including those that nobody has waited for yet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_runs(number) for number in ids):
            return True
        time.sleep(0.05)
    return False


def _runs(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def executor(make_program, on_ranks):
    executor = on_ranks(make_program("full"), 2)
    executor.allocate(2)
    return executor


def step(executor):
    return executor.decode(ONE, ONE, np.zeros((3, 1), np.int64))


def test_a_rank_that_is_killed_between_calls_ends_the_others_at_once(executor):
    ids = executor.group.process_ids
    os.kill(ids[1], signal.SIGKILL)
    assert gone(ids), "without a call"
    for _ in range(2):
        with pytest.raises(UnsupportedEnvironment) as ended:
            step(executor)
        assert ended.value.message == f"rank 1 of 2 (process {ids[1]}) was ended by SIGKILL; the others were ended"
        assert ended.value.exit_code == 3
        assert ended.value.hint
        assert "\n" not in ended.value.message


@pytest.mark.one_in(2)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_while_others_wait_ends_all_of_them(killed, executor):
    ids = executor.group.process_ids
    directory = executor.group._processes.directory
    os.kill(ids[killed], signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (ids[killed], signal.SIGKILL)).start()
    with pytest.raises(UnsupportedEnvironment, match=f"rank {killed} of 2 .* was ended by SIGKILL; the others"):
        executor.prefill(*padded(prompts((5,))))
    assert gone(ids)
    assert not directory.exists()


def test_a_rank_that_ends_by_itself_shows_its_last_line(new_processes, executor):
    ids = executor.group.process_ids
    os.kill(ids[1], signal.SIGABRT)
    assert gone(ids)
    with pytest.raises(UnsupportedEnvironment, match=r"rank 1 of 2 .* was ended by SIGABRT"):
        step(executor)


def test_a_rank_that_raises_ends_the_others(executor):
    """A bug on one rank alone: the others have gone on, so nothing after it can be right."""
    ids = executor.group.process_ids
    name, row = "k_cache.0", executor.read_row(0)["k_cache.0"]
    rows = [(0, [(name, row[:1])]), (0, [(name, row[:, :1, :1, None])])]
    with pytest.raises(RankError, match=r"^rank 1 of 2: \w*Error: ") as raised:
        executor.group.call_each(executor._opened(), "write_row", rows)
    assert "\n" not in str(raised.value)
    assert "write_row" in str(raised.value.__cause__), "the rank's traceback"
    assert gone(ids)
    with pytest.raises(RankError):
        step(executor)


def test_a_rank_that_fails_before_the_sum_ends_the_others(executor):
    """One rank fails before its part of a step, the other one waits in the sum and is ended."""
    ids = executor.group.process_ids
    right, wrong = (ONE, ONE, np.zeros((3, 1), np.int64)), (ONE, ONE, np.zeros((2, 1), np.int64))
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0 of 2"):
        executor.group.call_each(executor._opened(), "decode", [wrong, right])
    assert time.monotonic() - start < SECONDS
    assert gone(ids)


def test_ranks_that_were_ended_are_not_asked_again(executor):
    ids = executor.group.process_ids
    executor.close()
    assert gone(ids)
    assert not executor.group._processes._watch.is_alive(), "it reads what `close` removes"
    with pytest.raises(ValueError, match="the ranks have been ended"):
        step(executor)


SCRIPT = """
import signal, sys, time
from kvc_trt.backends.torch.parallel.group import RankGroup
from kvc_trt.files.held import HeldFile
from tests.small_model import SMALL

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
group = RankGroup(SMALL, HeldFile(sys.modules["tests.small_model"].__file__), 2)
group._start()
print(*group.process_ids, group._processes.directory, flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("end", ["killed", "interrupted", "done"])
def test_ranks_end_with_the_process_that_started_them(end):
    arguments = [sys.executable, "-c", SCRIPT, "go" if end == "done" else "wait"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parents[4]
    ) as caller:
        *ids, directory = caller.stdout.readline().split()
        if end != "done":
            caller.send_signal(signal.SIGKILL if end == "killed" else signal.SIGINT)
        caller.wait(SECONDS)
    assert len(ids) == 2
    assert gone(map(int, ids))
    assert not Path(directory).exists()


def test_more_ranks_than_gpus_are_refused(make_program, tmp_path, monkeypatch):
    import torch

    program = make_program("full")
    monkeypatch.setenv(loading.VARIABLE, str(compile_double(tmp_path, executor="cuda")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UnsupportedEnvironment, match=r"--tp 2 needs 2 GPUs, one per rank; this machine has 1") as no:
        RankGroup(program.model, program.weight_file, 2)
    assert no.value.exit_code == 3
    assert RankGroup(program.model, program.weight_file, 2, device="cpu").process_ids == []
