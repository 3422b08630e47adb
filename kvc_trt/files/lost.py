"""A mapped file that was cut short ends the process with one line and exit code 3, not by a signal without a word.

The system delivers SIGBUS to the thread that reads the missing pages. Python's own handlers run after the read, which
never ends; docs/decisions/0034-files-cut-short.md says why this handler may run Python all the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from kvc_trt.errors import UnsupportedEnvironment

MAPPINGS: dict[int, tuple[int, Path]] = {}
"""Address -> bytes and file of every mapping that is alive; `HeldFile.map` keeps it."""
_SA_SIGINFO, _SIGNAL_SET_BYTES, _ADDRESS_AT = 4, 128, 16
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux with 64-bit pointers, in glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * _SIGNAL_SET_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_reporting = threading.Lock()
"""Taken by the thread that reports; other threads that read lost pages wait for the end of the process."""
_kept: list[Any] = []
"""The handler and the action before it, which must live as long as the process."""


def report_lost_files() -> None:
    """Report mapped files that are cut short, from now on and in every thread of this process.

    For processes of our own, such as the command line and servers; elsewhere than on 64-bit Linux it does nothing.
    """
    if _kept or not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    before = _Action()

    def report(number: int, information: int, _: int) -> None:
        address = ctypes.c_uint64.from_address(information + _ADDRESS_AT).value
        for start, (size, path) in list(MAPPINGS.items()):
            if start <= address < start + size:
                _reporting.acquire()
                said = (
                    f"error: {path} was cut short while it was in use: the pages that were read are no longer there\n"
                )
                hint = "hint: put the file back and run the command again; --sealed reads a copy in memory\n"
                os.write(2, (said + hint).encode("utf-8", "backslashreplace"))
                os._exit(UnsupportedEnvironment.exit_code)
        sigaction(number, ctypes.byref(before), None)  # the read fails again, and ends as it would have without us

    handler = _Handler(report)
    action = _Action(handler=ctypes.cast(handler, ctypes.c_void_p), flags=_SA_SIGINFO)
    if sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before)) == 0:
        _kept.extend((handler, before))
