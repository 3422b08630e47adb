"""Errors in which the system and libraries say that a machine has run out of something, told from bugs."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator

from kvc_trt.errors import UnsupportedEnvironment, describe
from kvc_trt.files.atomic import OUT_OF_SPACE
from kvc_trt.sizes import readable_size

LEAST_ADDRESS_SPACE = 512 << 20
"""With less, libraries end the process while they are loaded, each in its own way and some without a word."""

_NO_MEMORY = "free some memory, raise the limit (ulimit -v), or take a shorter prompt or a smaller batch"
_NO_THREADS = "raise the limits of memory and processes (ulimit -v, ulimit -u), or take fewer --threads"
_HINTS = {
    **dict.fromkeys(OUT_OF_SPACE, "free some space and repeat the command"),
    errno.EIO: "see whether the disk is in order",
    errno.EROFS: "give a path that can be written",
    errno.ENOMEM: _NO_MEMORY,
    errno.EAGAIN: _NO_THREADS,
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs: the machine has no open files left",
}
_THREADS = re.compile(r"can't start new thread|pthread_create[^:\n]*")
_MEMORY = re.compile(r"std::bad_alloc|(failed to|can't|cannot) allocate memory[^:.\n]*|failed to map segment.*", re.I)
"""What libraries write into errors of general kinds (RuntimeError, ImportError, ONNX Runtime's own)."""


def check_address_space() -> None:
    """Raise UnsupportedEnvironment where a limit leaves too little to load the libraries."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise UnsupportedEnvironment(
            f"the limit of this process's memory is {readable_size(limit)}, expected at least "
            f"{readable_size(LEAST_ADDRESS_SPACE)}",
            hint=f"ulimit -v {LEAST_ADDRESS_SPACE >> 10}, or more",
        )


def exhaustion(error: BaseException) -> UnsupportedEnvironment | None:
    """Return the user's error for one that says what could not be had; None for any other."""
    for one in _with_causes(error):
        if isinstance(one, MemoryError):
            return UnsupportedEnvironment(_sentence("too little memory", str(one)), hint=_NO_MEMORY)
        if isinstance(one, OSError) and one.errno in _HINTS:
            where = f" while writing {one.filename or 'the output'}" if one.errno in OUT_OF_SPACE else ""
            return UnsupportedEnvironment(f"{one.strerror}{where}", hint=_HINTS[one.errno])
        if said := _THREADS.search(str(one)):
            return UnsupportedEnvironment(_sentence("no further thread can be started", said[0]), hint=_NO_THREADS)
        if said := _MEMORY.search(str(one)):
            return UnsupportedEnvironment(_sentence("too little memory", said[0]), hint=_NO_MEMORY)
    return None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _sentence(what: str, said: str) -> str:
    detail = describe(" ".join(said.split()), 160)[1:-1]
    return f"{what}: {detail}" if detail else what
