"""Child processes: started again, told of, and gone when they should be."""

from __future__ import annotations

import asyncio
import signal
import sys

import psutil
import pytest

from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.serving.processes import Child, ended

WAIT = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"


def child(tmp_path, code, said=None):
    said = [] if said is None else said
    return Child("it", [sys.executable, "-c", code], {}, tmp_path / "log", said.append)


async def until(holds):
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


def test_it_is_started_again_when_it_dies_and_ends_when_it_is_stopped(tmp_path):
    async def story():
        said: list[str] = []
        one = child(tmp_path, WAIT, said)
        keeping = asyncio.create_task(one.keep())
        await until(lambda: one.pid)
        one.is_ready, first = True, one.pid
        psutil.Process(first).kill()
        await until(lambda: one.pid not in (None, first))
        assert said == ["it ended (signal 9) and is started again"]
        second = one.pid
        await one.stop()
        await keeping
        assert not psutil.pid_exists(second)

    asyncio.run(story())


def test_what_never_worked_is_an_error(tmp_path):
    with pytest.raises(UnsupportedEnvironment, match=r"it ended \(exit code 7\): the last word"):
        asyncio.run(child(tmp_path, "print('the last word'); raise SystemExit(7)").keep())


def test_what_dies_again_and_again_is_an_error(tmp_path):
    said: list[str] = []
    one = child(tmp_path, "raise SystemExit(1)", said)
    one.is_ready = True
    with pytest.raises(UnsupportedEnvironment, match="it wrote nothing"):
        asyncio.run(one.keep())
    assert len(said) == 2


def test_what_does_not_end_is_killed(tmp_path):
    async def story():
        one = child(tmp_path, STUBBORN)
        keeping = asyncio.create_task(one.keep())
        await until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text())
        await one.stop(0.2)
        await keeping

    asyncio.run(story())


def test_an_error_of_ours_is_passed_on(tmp_path):
    log = tmp_path / "log"
    log.write_text("WARN something\nerror: the engine was changed\nhint: build it again\nmore\n")
    found = ended("worker", 2, log)
    assert isinstance(found, InputError)
    assert (found.message, found.hint) == ("the engine was changed", "build it again")
    assert ended("worker", 3, log).exit_code == 3


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a process that its parent is gone")
def test_it_does_not_outlive_its_parent(tmp_path):
    code = (
        "import asyncio, pathlib, sys\n"
        "from kvc_trt.serving.processes import Child\n"
        f"one = Child('it', [sys.executable, '-c', {WAIT!r}], {{}}, pathlib.Path({str(tmp_path / 'log')!r}), print)\n"
        "async def story():\n"
        "    keeping = asyncio.create_task(one.keep())\n"
        "    while one.pid is None: await asyncio.sleep(0.01)\n"
        "    print(one.pid, flush=True)\n"
        "    await keeping\n"
        "asyncio.run(story())\n"
    )
    import subprocess

    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    below = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    below.wait(10)
