from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from kvc_trt.cli.process.ending import GRACE_SECONDS

BEGIN = """
import hashlib, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from kvc_trt.cli.process.ending import end_in_time
from kvc_trt.files.unfinished import unfinished_directory
end_in_time()
def long():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # one call into C, without Python's lock
with unfinished_directory(Path(sys.argv[1])) as made:
    print("begun", flush=True)
"""
WORK = {
    "waits in Python": "time.sleep(600)",
    "computes in C": "long()",
    "waits for a thread": "\n    with ThreadPoolExecutor(1) as pool: pool.submit(long)",
    "swallows it": "\n    while True:\n        try: time.sleep(600)\n        except BaseException: pass",
}


@pytest.mark.parametrize(
    ("work", "number", "code"),
    [*((work, signal.SIGTERM, 143) for work in WORK), ("computes in C", signal.SIGINT, 130)],
)
def test_a_process_ends_in_time_and_leaves_nothing(tmp_path, work, number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + "    " + WORK[work], str(tmp_path / "target")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert len(list(tmp_path.iterdir())) == 1
        time.sleep(0.1)  # so that it works
        process.send_signal(number)
        assert process.wait(60) == code  # the work would take half an hour
    finally:
        process.kill()
        process.communicate()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("around", ["contextlib.nullcontext", "event_loop_inside"])
def test_a_signal_while_an_object_is_freed_ends_the_process_without_a_traceback(around):
    """Python drops what is raised there, and goes on; the line that is being typed is read by an event loop."""
    program = f"""
import contextlib, os, signal, time
from kvc_trt.cli.process.ending import end_in_time, event_loop_inside
end_in_time()
class Freed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
with {around}():
    Freed()
    time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (143, "")


def test_the_grace_period_is_under_two_seconds():
    assert GRACE_SECONDS < 2


def test_a_first_ctrl_c_that_is_caught_leaves_the_process_running():
    """It is heard while a call into C keeps Python from running, ends nothing, and the second one ends the process."""
    program = """
import hashlib, sys, threading, time
from kvc_trt.cli.process.ending import end_in_time, first_interrupt
end_in_time()
heard = threading.Event()
with first_interrupt(heard.set):
    print("begun", flush=True)
    while not heard.is_set():
        time.sleep(0.01)
with first_interrupt(heard.clear):
    pass
with first_interrupt(heard.clear):
    print("stopped", flush=True)
    while heard.is_set():
        time.sleep(0.01)
    try:
        print("again", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:  # what swallows it is ended too
        time.sleep(600)
"""
    assert interrupted_at(program, "begun", "stopped", "again") == 130


def test_a_ctrl_c_that_came_outside_ends_the_process():
    program = """
import time
from kvc_trt.cli.process.ending import end_in_time, first_interrupt
end_in_time()
with first_interrupt(print):
    pass
try:
    print("begun", flush=True)
    time.sleep(600)
except KeyboardInterrupt:  # what swallows it is ended too
    time.sleep(600)
"""
    assert interrupted_at(program, "begun") == 130


def interrupted_at(program, *lines):
    """Send Ctrl-C to a program after each of the lines that it prints; return its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in lines:
            assert process.stdout.readline() == f"{line}\n"
            process.send_signal(signal.SIGINT)
        return process.wait(60)
    finally:
        process.kill()
        process.communicate()
