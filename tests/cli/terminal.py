"""A command on a terminal of its own, as a person at the keys meets it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence

SECONDS = 60.0
"""Time for what is waited for; a busy machine is no error."""
CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
SLOWLY = """
import sys, time
from kvc_trt.runtime.session.session import Session
step = Session.advance
def slow(session):
    time.sleep(0.2)
    step(session)
Session.advance = slow
from kvc_trt.cli.main import main
main(sys.argv[1:])
"""
"""The command with steps of a fifth of a second, so that an answer lasts until it is stopped."""
_STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """80 columns wide, and the process on it."""

    def __init__(self, process: subprocess.Popen[bytes], keys: int) -> None:
        self.process, self._keys, self._unread = process, keys, ""
        self.shown = ""
        """All that was shown so far, without what steers the cursor."""

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._keys, keys.encode())

    def expect(self, pattern: str) -> str:
        """Wait for a text after what was waited for before; return what came up to its end."""
        end = time.monotonic() + SECONDS
        while (found := re.search(pattern, self._unread, re.DOTALL)) is None:
            assert time.monotonic() < end, f"{pattern!r} is not in {self._unread!r}"
            if select.select([self._keys], [], [], 0.2)[0]:
                try:
                    new = os.read(self._keys, 1 << 16).decode(errors="replace")
                except OSError as error:  # the process has ended
                    raise AssertionError(f"{pattern!r} is not in {self._unread!r}") from error
                new = _STEERING.sub("", new)
                self._unread += new
                self.shown += new
        came, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return came

    def ended(self) -> int:
        """Wait for the end of the process, reading what it still shows; return its exit code."""
        with contextlib.suppress(AssertionError):
            self.expect("$ never")
        return self.process.wait(SECONDS)


@contextlib.contextmanager
def terminal(program: str, arguments: Sequence[str]) -> Iterator[Terminal]:
    """Run a Python program on a terminal, and end it."""
    keys, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=screen, stdout=screen, stderr=screen, start_new_session=True, preexec_fn=lambda: _control(0),
        env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
    )  # fmt: skip
    os.close(screen)
    try:
        yield Terminal(process, keys)
    finally:
        process.kill()
        process.wait()
        os.close(keys)


def _control(screen: int) -> None:
    """Make the terminal that of the new session, so that Ctrl-C is a signal; a background job ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)
