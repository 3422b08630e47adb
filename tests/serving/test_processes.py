"""Child processes are restarted, reported, and gone when they should be."""

from __future__ import annotations

import asyncio
import http.server
import signal
import socket
import sys
import threading
from contextlib import suppress

import psutil
import pytest

from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.serving.processes import Child, ask_here, ended, until_asked

WAIT = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
)


def child(tmp_path, code, said=None):
    said = [] if said is None else said
    return Child("it", [sys.executable, "-c", code], {}, tmp_path / "log", said.append)


async def until(holds):
    for _ in range(12_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


def test_a_process_is_restarted_when_it_dies_and_ends_when_stopped(tmp_path):
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


def test_a_process_that_never_worked_is_an_error(tmp_path):
    with pytest.raises(UnsupportedEnvironment, match=r"it ended \(exit code 7\): the last word"):
        asyncio.run(child(tmp_path, "print('the last word'); raise SystemExit(7)").keep())


def test_a_process_that_keeps_dying_is_an_error(tmp_path):
    said: list[str] = []
    one = child(tmp_path, "raise SystemExit(1)", said)
    one.is_ready = True
    with pytest.raises(UnsupportedEnvironment, match="it wrote nothing"):
        asyncio.run(one.keep())
    assert len(said) == 2


def test_a_process_that_does_not_end_is_killed(tmp_path):
    async def story():
        one = child(tmp_path, STUBBORN)
        keeping = asyncio.create_task(one.keep())
        await until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text())
        await one.stop(0.2)
        await keeping

    asyncio.run(story())


def test_an_error_ends_a_wait_that_loses_its_first_cancellation():
    """`asyncio.wait_for` loses one before Python 3.12: a server went on asking for a worker that had ended."""

    async def loses_one():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        await asyncio.sleep(600)

    async def fails():
        await asyncio.sleep(0)
        raise InputError("it cannot be served")

    async def serves():
        await asyncio.wait_for(until_asked(asyncio.Event(), [asyncio.create_task(fails())], loses_one()), 60)

    with pytest.raises(InputError, match="it cannot be served"):
        asyncio.run(serves())


def test_a_process_stopped_while_starting_ends(tmp_path, monkeypatch):
    """No process exists yet that could be asked to end."""
    start = asyncio.create_subprocess_exec

    async def story():
        begins, goes_on = asyncio.Event(), asyncio.Event()

        async def slow(*command, **options):
            begins.set()
            await goes_on.wait()
            return await start(*command, **options)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
        one = child(tmp_path, WAIT)
        keeping = asyncio.create_task(one.keep())
        await begins.wait()
        await one.stop()
        goes_on.set()
        await asyncio.wait_for(keeping, 120)
        assert one.pid is None

    asyncio.run(story())


def test_no_proxy_is_asked_for_this_machine(monkeypatch):
    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"here")

        def log_message(self, *_):
            pass

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert ask_here(f"http://127.0.0.1:{server.server_port}/", seconds=60) == (200, b"here")
        thread.join()
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            with pytest.raises(OSError, match="refused"):
                ask_here(f"http://127.0.0.1:{nobody.getsockname()[1]}/", seconds=60)


def test_an_error_of_ours_is_passed_on(tmp_path):
    log = tmp_path / "log"
    log.write_text("WARN something\nerror: the engine was changed\nhint: build it again\nmore\n")
    found = ended("worker", 2, log)
    assert isinstance(found, InputError)
    assert (found.message, found.hint) == ("the engine was changed", "build it again")
    assert ended("worker", 3, log).exit_code == 3


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a process that its parent is gone")
def test_a_process_does_not_outlive_its_parent(tmp_path):
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
    below.wait(120)
