"""Standard streams that may be closed, or end on a full disk.

A command prints its result to stdout, so a failure to write it is an error. It prints advice to stderr, and losing that
is not an error.
"""

from __future__ import annotations

import io
import os
import sys


class _Lossy(io.FileIO):
    """A file that drops bytes that cannot be written."""

    def write(self, content: object) -> int:
        """Write the bytes that the disk takes, and count all as written."""
        try:
            return super().write(content)  # type: ignore[arg-type]
        except OSError:
            return memoryview(content).nbytes  # type: ignore[arg-type]


def prepare_streams() -> None:
    """Keep the numbers 0 to 2 for the standard streams, and let stderr drop text that cannot be written.

    The first file that a process opens takes the number of a stream that its parent has closed, and the output of
    libraries would then go into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    buffered = io.BufferedWriter(_Lossy(2, "wb", closefd=False))
    encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
    sys.stderr = io.TextIOWrapper(buffered, encoding, "backslashreplace", line_buffering=True)


def drop_unwritten() -> None:
    """Flush stdout, or drop its buffer: the interpreter would fail on it once more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
