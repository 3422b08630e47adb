"""Errors in which the system and libraries say that a machine has run out of something, told from bugs."""

from __future__ import annotations

import errno
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from kvc_trt.errors import UnsupportedEnvironment, describe
from kvc_trt.files.atomic import OUT_OF_SPACE
from kvc_trt.sizes import readable_size

LEAST_ADDRESS_SPACE = 512 << 20
"""With less, libraries end the process while they are loaded, each in its own way and some without a word."""
_LEAST_FOR = {"torch": 1 << 30}
"""The least memory for libraries that only some commands load, by module."""

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
"""Words that libraries write into errors of general kinds (RuntimeError, ImportError, ONNX Runtime's own)."""


def check_address_space() -> None:
    """Raise UnsupportedEnvironment where a limit leaves too little to load the libraries, now or when one is needed."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    _require(limit, LEAST_ADDRESS_SPACE, "")
    if not any(isinstance(finder, _RoomForLibraries) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RoomForLibraries())


class _RoomForLibraries(MetaPathFinder):
    """Finds no module, but is asked before any is loaded."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise UnsupportedEnvironment for a library that the limit leaves too little for."""
        if fullname in _LEAST_FOR:
            _require(resource.getrlimit(resource.RLIMIT_AS)[0], _LEAST_FOR[fullname], f" to load {fullname}")


def _require(limit: int, least: int, purpose: str) -> None:
    if limit != resource.RLIM_INFINITY and limit < least:
        raise UnsupportedEnvironment(
            f"the limit of this process's memory is {readable_size(limit)}, expected at least {readable_size(least)}"
            f"{purpose}",
            hint=f"ulimit -v {least >> 10}, or more",
        )


def exhaustion(error: BaseException) -> UnsupportedEnvironment | None:
    """Return the user's error for an exception that reports exhausted memory, disk or files; None for any other."""
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
