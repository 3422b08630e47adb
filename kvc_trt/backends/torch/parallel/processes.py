"""The processes of all ranks: started together, and ended together as soon as one of them dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

from kvc_trt.errors import UnsupportedEnvironment, describe
from kvc_trt.kernels.loading import VARIABLE, library_path

SECONDS_TO_DIE = 5.0
"""For a process that has closed its sockets."""
_LAST_WORDS = 4096
"""Bytes of a dead rank's error output that are searched for its last line."""


class RankProcesses:
    """Processes that wait for their first message. `end` kills them all; they also end when this process does."""

    def __init__(self, ranks: int, threads: int, weights: int) -> None:
        """Start them; each is given `weights`, the descriptor of an open file, under the same number."""
        self.directory = Path(tempfile.mkdtemp(prefix="kvc-trt-ranks-"))
        """A private directory, through which the ranks meet."""
        self.commands: list[Connection] = []
        """One end of a socket per rank."""
        self._lives: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ending = threading.Event()
        self._death: str | None = None
        self._watch: threading.Thread | None = None
        try:
            for _ in range(ranks):
                self._start(threads, weights)
        except BaseException:
            self.end()
            raise
        self._watch = threading.Thread(target=self._end_if_one_dies, name="kvc-trt ranks", daemon=True)
        self._watch.start()

    @property
    def ids(self) -> list[int]:
        """Process ids, in the order of the ranks."""
        return [process.pid for process in self._processes]

    def death(self, seconds: float) -> str | None:
        """Return which rank has died and how, in one line, waiting so long for one; None if none has."""
        if self._watch is not None:
            self._watch.join(seconds)
        return self._death

    def end(self) -> None:
        """Kill all ranks and wait for them. Nothing that they would have to put away is outside of their memory."""
        self._ending.set()
        self._kill()
        for process in self._processes:
            process.wait()
        # It waits for sockets, whose numbers other files may get once they are closed, and reads what a rank has said.
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join(SECONDS_TO_DIE)
        for connection in (*self.commands, *self._lives):
            with contextlib.suppress(OSError):
                connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, threads: int, weights: int) -> None:
        (commands, its_commands), (life, its_life) = Pipe(), Pipe()
        self.commands.append(commands)
        self._lives.append(life)
        sockets = its_commands.fileno(), its_life.fileno()
        try:
            with self._output(len(self._processes)).open("wb") as output:
                process = started(sockets, weights, output, _environment(threads))
        except OSError as error:
            raise UnsupportedEnvironment(f"cannot start {sys.executable!r} as a rank: {error}") from error
        finally:
            its_commands.close()
            its_life.close()
        self._processes.append(process)

    def _output(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.err"

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its own child processes, such as compilers

    def _end_if_one_dies(self) -> None:
        """Kill the others when one rank has died: on a GPU they would wait for it in a sum until a timeout."""
        dead: list[Any] = wait(self._lives)
        if self._ending.is_set():
            return
        rank = self._lives.index(dead[0])
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_DIE)
        self._death = f"rank {rank} of {len(self._processes)} (process {process.pid}) {self._how(rank)}"
        self._kill()

    def _how(self, rank: int) -> str:
        status = self._processes[rank].poll()
        if status == -signal.SIGKILL:  # from outside: its own last words have nothing to do with it
            return "was ended by SIGKILL"
        if status is not None and status < 0:
            return f"was ended by {signal.Signals(-status).name}{self._last_line(rank)}"
        return f"ended with status {status}{self._last_line(rank)}"

    def _last_line(self, rank: int) -> str:
        words = self._output(rank).read_bytes()[-_LAST_WORDS:].decode(errors="replace")
        lines = [line for line in words.splitlines() if line.strip()]
        return f": {describe(lines[-1].strip(), 200)[1:-1]}" if lines else ""


def started(
    sockets: tuple[int, int], weights: int, output: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that becomes a rank: its sockets and `weights` keep their numbers, `output` takes its errors."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvc_trt.backends.torch.parallel.rank", *map(str, sockets)],
        pass_fds=(*sockets, weights),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=output,
        env=environment,
        start_new_session=True,  # an interrupt on the terminal is for the caller, who ends the ranks
    )


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of a rank: this process's modules and kernel library, and sockets of loopback alone."""
    found = {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    library = library_path()
    found.pop(VARIABLE, None)
    return found if library is None else {**found, VARIABLE: str(library[0])}
