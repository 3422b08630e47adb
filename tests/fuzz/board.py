"""Counters that a worker writes and the campaign reads, also after the worker has died in the middle of an input."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path


class Board(ctypes.Structure):
    """Lies in a file that both processes map."""

    _fields_ = (
        ("ready", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("started", ctypes.c_double),
        ("inputs", ctypes.c_int64),
        ("accepted", ctypes.c_int64),
        ("refused", ctypes.c_int64),
        ("bad", ctypes.c_int64),
        ("compared", ctypes.c_int64),
        ("only_ours", ctypes.c_int64),
        ("slowest", ctypes.c_double),
        ("slowest_number", ctypes.c_int64),
        ("peak", ctypes.c_int64),
        ("peak_number", ctypes.c_int64),
    )
    """`number` is the input that is being read, `started` when (time.monotonic), `peak` the most bytes that one input
    added, `compared` how many another reader read too, `only_ours` how many of them it refused."""


def mapped(path: Path) -> Board:
    """Return the board in a file, which is made where there is none."""
    size = ctypes.sizeof(Board)
    if not path.exists():
        path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return Board.from_buffer(mmap.mmap(file.fileno(), size))
