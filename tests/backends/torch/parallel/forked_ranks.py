"""Ranks forked from a process that has imported PyTorch once; one that is started anew imports it for three seconds.

    python -m tests.backends.torch.parallel.forked_ranks SOCKET

is that process. `ForkedRanks.started` stands for `kvc_trt.backends.torch.parallel.processes.started`.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import IO, BinaryIO, cast

IMPORTED = (
    "kvc_trt.backends.torch.executor",
    "kvc_trt.backends.torch.parallel.decoder",
    "kvc_trt.backends.torch.parallel.rank",
    "kvc_trt.backends.torch.parallel.weights",
)
"""Modules that every rank imports."""
LONGEST = 1 << 18
"""Bytes of a request: the environment of a rank."""


class ForkedRank:
    """The part of subprocess.Popen that ranks need, for a process that another one has started."""

    def __init__(self, told: BinaryIO) -> None:
        """`told`: an unbuffered pipe with a line of the rank that names its process, later one with its exit status."""
        self._told, self._status, self._lock = told, None, Lock()
        rank, number = told.readline().split()
        assert rank == b"rank"
        self.pid = int(number)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the rank runs."""
        with self._lock:
            if self._status is None and _readable(self._told, 0.0):
                self._status = int(self._told.readline())
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; subprocess.TimeoutExpired without one after `timeout` seconds."""
        if self._status is None:
            _readable(self._told, timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return status


class ForkedRanks:
    """The process that forks, from the first rank until `end`."""

    def __init__(self) -> None:
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def started(
        self, sockets: tuple[int, int], weights: int, output: IO[bytes], environment: Mapping[str, str]
    ) -> ForkedRank:
        """A rank as `processes.started` starts it."""
        if self._server is None:
            self._server = self._started_server()
        told, tells = os.pipe()
        request = {"sockets": sockets, "weights": weights, "environment": dict(environment)}
        socket.send_fds(self._server[1], [json.dumps(request).encode()], [tells, output.fileno(), *sockets, weights])
        os.close(tells)
        return ForkedRank(cast(BinaryIO, os.fdopen(told, "rb", buffering=0)))

    def end(self) -> None:
        """End the process; its ranks have ended."""
        if self._server is not None:
            process, requests = self._server
            requests.close()
            assert process.wait(60) == 0

    def _started_server(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        requests, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            command = [sys.executable, "-m", __name__, str(its.fileno())]
            nothing = subprocess.DEVNULL
            process = subprocess.Popen(
                command, pass_fds=[its.fileno()], cwd=Path(__file__).parents[4], stdin=nothing, stdout=nothing
            )
        return process, requests


def _readable(file: BinaryIO, seconds: float | None) -> bool:
    return bool(select.select([file], [], [], seconds)[0])


def serve(requests: socket.socket) -> None:
    """Fork a rank for each request, and tell how each has ended."""
    for name in IMPORTED:
        import_module(name)
    gc.freeze()
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _tell_ends(running)
        if requests in ready:
            text, files, _, _ = socket.recv_fds(requests, LONGEST, 5)
            if not text:
                return
            number = os.fork()
            if number == 0:
                for file in (*running.values(), *(one.detach() for one in (requests, woken, wake))):
                    os.close(file)
                _become_a_rank(files, **json.loads(text))
            status, *others = files
            running[number] = status
            for file in others:
                os.close(file)


def _tell_ends(running: dict[int, int]) -> None:
    for number in list(running):
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            pipe = running.pop(number)
            os.write(pipe, b"%d\n" % os.waitstatus_to_exitcode(status))
            os.close(pipe)


def _become_a_rank(files: Sequence[int], sockets: Sequence[int], weights: int, environment: Mapping[str, str]) -> None:
    """Run a rank in this forked process as in a new one, in its own session and environment."""
    from kvc_trt.backends.torch.parallel.rank import main

    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        files = [*files, os.open(os.devnull, os.O_RDWR)]
        beyond = max(*files, *sockets, weights) + 1  # no file takes the number of one that has not moved yet
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, beyond) for file in files]
        for file in files:
            os.close(file)
        told, output, *given, nothing = moved
        for file, number in zip([nothing, nothing, output, *given], [0, 1, 2, *sockets, weights], strict=True):
            os.dup2(file, number)
        os.write(told, b"rank %d\n" % os.getpid())
        for file in moved:
            os.close(file)
        sys.argv[1:] = map(str, sockets)
        main()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
