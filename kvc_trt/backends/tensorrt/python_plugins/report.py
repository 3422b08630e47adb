"""Report the reason why a plugin refused something: one line, on stderr and through `last_refusal()`.

The lines equal those of the C++ plugins (plugins_cuda/tensorrt/report.h), which a test checks; here a reason of the C
ABI includes the name of its function.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from kvc_trt.operators.dimensions import Refusal

_thread = threading.local()


def last_refusal() -> str:
    """Return the last line reported on the calling thread; "" before the first."""
    return getattr(_thread, "line", "")


def report(where: str, error: Exception) -> None:
    """Keep and print the reason, for callbacks that cannot raise an exception."""
    print(_keep(where, error), file=sys.stderr, flush=True)


@contextlib.contextmanager
def reporting(where: str) -> Iterator[None]:
    """Keep an exception of the block and raise it as a Refusal: TensorRT's bindings print it and report a failure."""
    try:
        yield
    except Exception as error:
        raise Refusal(_keep(where, error)) from error


def _keep(where: str, error: Exception) -> str:
    """Keep and return "kvc plugin: <where>: <reason>", with '?' for control characters."""
    reason = str(error) or type(error).__name__
    line = "".join(c if c.isprintable() else "?" for c in f"kvc plugin: {where}: {reason}")
    _thread.line = line
    return line
