"""Progress of long work: the protocol, and its silent, plain and animated forms.

Libraries take a `Progress` and never print themselves; the command line chooses the form (`progress_on`). Progress
lines may name files and tensors of strangers, so characters that a terminal obeys are escaped.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from kvc_trt.errors import escaped

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar

Advance = Callable[[int], None]
"""Called with the amount of work done since the last call, in the unit of the task's total."""

SECONDS_BETWEEN_LINES = 5.0
SECONDS_WORTH_REPORTING = 1.0
_LONGEST_SILENCE = 60.0


class Progress(Protocol):
    """The display to which a long task reports."""

    def task(self, description: str, total: int | None) -> AbstractContextManager[Advance]:
        """Open one task of `total` units (None: unknown) and yield its `advance(n)`."""
        ...

    def note(self, message: str) -> None:
        """Show a message on a separate line."""
        ...


class NullProgress:
    """Progress that is not shown."""

    @contextlib.contextmanager
    def task(self, description: str, total: int | None) -> Iterator[Advance]:
        """Ignore the task."""
        yield lambda amount: None

    def note(self, message: str) -> None:
        """Ignore the message."""


@dataclass(eq=False)
class _OpenTask:
    """A task of `LineProgress` that is not over."""

    description: str
    total: int | None
    started: float
    last: float
    """The time of its last line, or of its start."""
    done: int = 0

    def line(self, now: float) -> str:
        """Say how far it is, and how long the rest takes, or how long it has taken."""
        seconds = now - self.started
        left = _left(seconds, self.done, self.total)
        if left or self.total == self.done:
            return f"{self.description}: {_share(self.done, self.total)}{left}"
        share = f"{_share(self.done, self.total)}, " if self.done else ""
        return f"{self.description}: {share}{seconds:.0f} s so far"


class LineProgress:
    """Plain lines for logs: one every few seconds of a long task, and one after each that took over a second."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._open: list[_OpenTask] = []
        self._last = 0.0
        self._writing = threading.Lock()

    @contextlib.contextmanager
    def task(self, description: str, total: int | None) -> Iterator[Advance]:
        """Print `description: 40%` now and then; where nothing advances, how long that has taken."""
        started, ended = time.monotonic(), threading.Event()
        own = _OpenTask(description, total, started, started)
        if not self._open:
            self._last = started
            # Without one more thread the task goes on, and is silent between its parts.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._repeat, args=(ended,), name="progress", daemon=True).start()
        self._open.append(own)

        def advance(amount: int) -> None:
            own.done += amount
            now = time.monotonic()
            if now - own.last >= SECONDS_BETWEEN_LINES:
                self._say(own, now)

        try:
            yield advance
        finally:
            self._open.remove(own)
            ended.set()
        seconds = time.monotonic() - started
        if seconds >= SECONDS_WORTH_REPORTING:
            self.note(f"{description}: done in {seconds:.1f} s")

    def note(self, message: str) -> None:
        """Print one line."""
        with self._writing:
            self._last = time.monotonic()
            print(escaped(message), file=self._stream, flush=True)

    def _repeat(self, ended: threading.Event) -> None:
        """Speak for the innermost task while nothing else does, until the outermost one has ended."""
        while not ended.wait(1.0):
            now = time.monotonic()
            # The list may change meanwhile, and a stream that cannot be written to is the command's own error.
            with contextlib.suppress(IndexError, OSError, ValueError):
                innermost = self._open[-1]
                rarer = min(_LONGEST_SILENCE, (now - innermost.started) / 3)
                if now - self._last >= max(SECONDS_BETWEEN_LINES, rarer):
                    self._say(innermost, now)

    def _say(self, task: _OpenTask, now: float) -> None:
        task.last = now
        self.note(task.line(now))


class RichProgress:
    """An animated bar per task on a terminal; a finished task disappears, notes stay."""

    def __init__(self) -> None:
        self._bar: RichBar | None = None

    @contextlib.contextmanager
    def task(self, description: str, total: int | None) -> Iterator[Advance]:
        """Draw a bar with the share done and the time left."""
        bar, outermost = self._bar or _new_bar(), self._bar is None
        if outermost:
            bar.start()
            self._bar = bar
        identifier = bar.add_task(escaped(description), total=total)
        try:
            yield lambda amount: bar.advance(identifier, amount)
        finally:
            bar.remove_task(identifier)
            if outermost:
                bar.stop()
                self._bar = None

    def note(self, message: str) -> None:
        """Print one line above the bars."""
        message = escaped(message)
        if self._bar is None:
            print(message, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(message, markup=False, highlight=False)


def progress_on(stream: TextIO | None = None) -> Progress:
    """Return the animated form where `stream` (default stderr) is a terminal, plain lines elsewhere."""
    stream = stream if stream is not None else sys.stderr
    return RichProgress() if stream.isatty() else LineProgress(stream)


def _new_bar() -> RichBar:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichBar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return RichBar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def _left(seconds: float, done: int, total: int | None) -> str:
    """Say how long the rest takes at the pace so far, if that can be said."""
    if not total or not 0 < done < total:
        return ""
    left = seconds * (total - done) / done
    return f", about {left:.0f} s left" if left < 100 else f", about {left / 60:.0f} min left"


def _share(done: int, total: int | None) -> str:
    return f"{100 * done / total:.0f}%" if total else f"{done} done"
