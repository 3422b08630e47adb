"""Run a command of kvc-trt in a process of its own that something happens to.

Trials are forked off a process that has imported the command line, so that each costs little more than its command.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvc_trt.cli.main import main

LONGEST_SECONDS = 120.0
"""A command that takes longer hangs."""


@dataclass(frozen=True)
class Folders:
    """The folders of one trial: the command writes to these and nowhere else."""

    root: Path

    @property
    def output(self) -> Path:
        """The path that the user asked for."""
        return self.root / "output"

    @property
    def cache(self) -> Path:
        """The cache of kvc-trt."""
        return self.root / "cache"

    @property
    def temporary(self) -> Path:
        """The system's folder for temporary files."""
        return self.root / "temporary"

    def make(self) -> None:
        """Make the three, empty."""
        for folder in (self.output, self.cache, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700, parents=True)

    def leftovers(self) -> list[str]:
        """Return the files that a command must not leave at its end: unfinished names, and anything temporary."""
        unfinished = [path for path in self.root.rglob(".*") if path.parent != self.root]
        cached = [path for name in ("stages", "scratch") for path in (self.cache / name).glob("*")]
        left = {*unfinished, *cached, *self.temporary.iterdir()}
        return sorted(path.relative_to(self.root).as_posix() for path in left)


@dataclass(frozen=True)
class Ended:
    """The end of a command."""

    code: int
    """The exit code, or minus the number of the signal."""
    seconds: float
    errors: str
    """The command's output on stderr."""

    @property
    def line(self) -> str:
        """The error that the user reads."""
        lines = [line for line in self.errors.splitlines() if line.startswith("error: ")]
        return lines[-1] if lines else self.errors[-200:]


class Running:
    """A command that runs. `prepare` is called in its process before it begins."""

    def __init__(self, arguments: list[str], folders: Folders, prepare: Callable[[], None] = lambda: None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it has been read
        self._started = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(arguments, folders, prepare)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        """Wait for its end; a command that hangs is killed, and its code is that of SIGKILL."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                deadline += LONGEST_SECONDS
            time.sleep(0.005)
        seconds = time.monotonic() - self._started
        self._errors.seek(0)
        with self._errors as errors:
            return Ended(os.waitstatus_to_exitcode(status), seconds, errors.read().decode(errors="replace"))

    def _run(self, arguments: list[str], folders: Folders, prepare: Callable[[], None]) -> None:
        code = 99
        try:
            os.environ |= {"KVC_TRT_CACHE": str(folders.cache), "TMPDIR": str(folders.temporary)}
            tempfile.tempdir = None
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(self._errors.fileno(), 2)
            # A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            prepare()
            main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 98
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)


@contextmanager
def folders() -> Iterator[Folders]:
    """Yield folders for trials, which are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="kvc-trt-faults-") as directory:
        yield Folders(Path(directory))
