"""Make a bad input smaller as long as it stays bad in the same way."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable

from tests.fuzz.kind import Kind
from tests.fuzz.verdict import KILL_AFTER, judge

LONGEST = 20.0
"""Seconds for one input."""


def smaller(content: bytes, is_still_bad: Callable[[bytes], bool], seconds: float = LONGEST) -> bytes:
    """Return a part of `content` that is still bad: pieces are left out, halves first, down to single bytes."""
    deadline = time.monotonic() + seconds
    piece = len(content) // 2
    while piece >= 1:
        start = 0
        while start < len(content):
            if time.monotonic() > deadline:
                return content
            tried = content[:start] + content[start + piece :]
            if is_still_bad(tried):
                content = tried
            else:
                start += piece
        piece //= 2
    return content


def verdict_key_in_child(kind: Kind, content: bytes) -> str:
    """Judge an input in a process of its own; returns the key of what is bad, also of a crash, or an empty text."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.write(writable, judge(kind, content).key.encode()[:4000])
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        found = _waited(child, kind.seconds * KILL_AFTER)
        return found or pipe.read().decode()


def _waited(child: int, seconds: float) -> str:
    """Wait for a process; return the reason why it did not exit on its own, or an empty text."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return crash_key(status) if os.WIFSIGNALED(status) else ""
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "takes too long"


def crash_key(status: int) -> str:
    """Return the key of a process that a signal ended."""
    return f"crash by {signal.Signals(os.WTERMSIG(status)).name}"
