"""The verdict on one input: accepted, refused in one bounded line, or bad, with where and why."""

from __future__ import annotations

import resource
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import kvc_trt
from kvc_trt.errors import LONGEST_MESSAGE, KvcError
from tests.fuzz.kind import Comparison, Kind

PATIENCE = 3
"""The time that passes, over the processor time that an input may take: a read that waits for something is a defect.
Time in which other processes had the processor does not count."""
KILL_AFTER = 1.5 * PATIENCE
"""A process that is silent for this many times the limit of an input cannot raise an alarm itself."""
_PACKAGE = Path(kvc_trt.__file__).parent


class TooLong(BaseException):
    """The input took more than it may; not an Exception, so that no reader takes it for one of its own."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one input."""

    kind: str
    """accepted, refused or bad."""
    seconds: float
    """Processor time of this process."""
    peak: int
    """Bytes by which the input raised the process's peak."""
    key: str = ""
    """The exception and the innermost line of kvc_trt, which all bad inputs of one defect share."""
    message: str = ""
    comparison: Comparison | None = None


def judge(kind: Kind, content: bytes) -> Verdict:
    """Let the kind read the input, and judge what comes of it."""
    before = _reset_peak()
    started = time.process_time()
    comparison = None
    try:
        with _alarm(kind.seconds):
            found = kind.read(content)
        what, key, message = "accepted", "", ""
        took, peak = time.process_time() - started, _peak() - before
        comparison = kind.compared(content, found)
        if comparison is not None and comparison.difference:
            what, key, message = "bad", f"differs: {comparison.difference}", comparison.difference
    except KvcError as error:
        took, peak = time.process_time() - started, _peak() - before
        problem = _unfit(error)
        what, key = ("bad", f"{problem} {_where(error)}") if problem else ("refused", "")
        message = repr(str(error)[:300])
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)) and not isinstance(error, TooLong):
            raise
        took, peak = time.process_time() - started, _peak() - before
        what, message = "bad", repr(error)[:300]
        key = "takes too long" if isinstance(error, TooLong) else f"{type(error).__name__} {_where(error)}"
    if what != "bad" and peak > kind.memory:
        what, key, message = "bad", "takes too much memory", f"{peak >> 20} MiB"
    return Verdict(what, took, peak, key, message, comparison)


def limit_memory(room: int) -> None:
    """Let the process take at most `room` bytes of addresses more than now: a MemoryError, not a dead machine."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + room, resource.getrlimit(resource.RLIMIT_AS)[1]))


def waited(process: int | Literal["self"] = "self") -> float:
    """Return for how many seconds a process could have run while others did; in steps of 10 ms, so that a wait ends."""
    return round(int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9, 2)


def _unfit(error: KvcError) -> str:
    """Return the reason why an error must not be printed as it is; empty if it may."""
    texts = (str(error), error.hint or "")
    if any(len(text) > LONGEST_MESSAGE for text in texts):
        return "message too long"
    return "" if all(text.isprintable() for text in texts) else "message not printable"


def _where(error: BaseException) -> str:
    """Return the innermost line of kvc_trt: file, line and function."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        path = Path(frame.filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE)}:{frame.lineno} {frame.name}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else "nowhere"


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    granted = waited()

    def too_long(number: int, _: FrameType | None) -> Any:
        nonlocal granted
        if number == signal.SIGALRM and (now := waited()) > granted:
            signal.setitimer(signal.ITIMER_REAL, now - granted)
            granted = now
            return
        raise TooLong(f"more than {seconds:g} s")

    before = [signal.signal(number, too_long) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


def _reset_peak() -> int:
    """Let the kernel count the peak anew; returns what the process holds now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"VmHWM"):
                return int(line.split()[1]) << 10
    return 0
