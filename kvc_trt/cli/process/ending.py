"""Ctrl-C and SIGTERM end a command within two seconds, wherever it is.

Python answers a signal between two of its own instructions, and the prefill of a long prompt is one instruction that
can take a minute. So a thread hears of signals too. It gives the command some time to unwind, in which every `finally`
removes its unfinished files. If that does not end it, the thread removes all unfinished files of the process, and ends
it. A server answers signals by its own event loop, which then hears of them instead.

A conversation takes the first Ctrl-C as the end of an answer (`first_interrupt`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from kvc_trt.files.unfinished import remove_own

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

GRACE_SECONDS = 1.0
INTERRUPTED, TERMINATED = 130, 143
_EXIT_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
_SHOW_CURSOR = b"\x1b[?25h"
_forgiven = threading.Event()
"""Set while the next Ctrl-C does not end the command."""


def end_in_time() -> None:
    """Answer SIGTERM by SystemExit, as Python answers Ctrl-C by KeyboardInterrupt, and end a process that neither one
    ends."""
    heard, told = os.pipe()
    os.set_blocking(told, False)

    def terminated(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # the thread hears of it where an event loop hears of signals instead
            os.write(told, bytes([number]))
        raise SystemExit(TERMINATED)  # unwinds the stack, so every `finally` removes its unfinished files

    signal.signal(signal.SIGTERM, terminated)
    sys.unraisablehook = _report_lost
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    with contextlib.suppress(RuntimeError):  # no memory for a thread: Python alone answers
        threading.Thread(target=_end_what_lasts, args=(heard,), name="kvc-trt signals", daemon=True).start()


@contextlib.contextmanager
def first_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C call `act`, and the second end the command, as any does outside of this."""

    def heard(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        act()

    before = signal.signal(signal.SIGINT, heard)
    _forgiven.set()
    try:
        yield
    finally:
        if signal.signal(signal.SIGINT, before) is heard:  # there was none, which the thread would still hear of
            _forgiven.clear()


@contextlib.contextmanager
def event_loop_inside() -> Iterator[None]:
    """Let the thread hear of signals again after an event loop, which hears of them meanwhile."""
    told = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)


def _report_lost(lost: UnraisableHookArgs) -> None:
    """Print an exception that Python has to drop as Python itself does, but not our own two.

    A signal that comes while an object is freed raises them where nothing can catch them; the thread ends the process.
    """
    if not isinstance(lost.exc_value, (KeyboardInterrupt, SystemExit)):
        sys.__unraisablehook__(lost)


def _end_what_lasts(heard: int) -> None:
    number = 0
    while number not in _EXIT_CODES:
        number = os.read(heard, 1)[0]
        if number == signal.SIGINT and _forgiven.is_set():
            _forgiven.clear()
            number = 0
    time.sleep(GRACE_SECONDS)
    remove_own()
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)  # a progress bar hides it
        if number == signal.SIGINT:
            os.write(2, b"error: interrupted\n")
    os._exit(_EXIT_CODES[signal.Signals(number)])
