"""Files and directories under construction: their names say so, and a lock says that a process still works on them.

A killed process removes nothing. It leaves its file beside the target, under a name that only this module gives, and
the file's lock ended with the process; the next write to the same target removes the file. Neither clocks nor process
numbers decide: both may be those of somebody else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

Kind = Literal["tmp", "old"]
"""A new file or directory, or the one that it replaces."""

_OPEN_FILES = Path("/proc/self/fd")
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
"""The answers to O_TMPFILE of file systems and kernels without files that have no name."""
_own: set[Path] = set()
"""The names of all that this process has under construction."""


class UnfinishedFile:
    """A new file, which has no name until it is whole; an unfinished name where the file system wants one.

    A context manager: a file that `finish` has not given the target's name is gone at the end. The target's directory
    exists.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._name: Path | None = None
        for leftover in abandoned(target):
            remove(leftover)
        descriptor = _nameless(target.absolute().parent)
        if descriptor is None:
            self._name, descriptor = _named(target)
        self.file: BinaryIO = os.fdopen(descriptor, "wb")

    def __enter__(self) -> UnfinishedFile:
        """The file is open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file, and remove it unless it has its target's name."""
        if self._name is not None:
            self._name.unlink(missing_ok=True)
            _own.discard(self._name)
        with contextlib.suppress(OSError):  # a write that failed is tried again here
            self.file.close()

    def finish(self, *, replace: bool) -> None:
        """Force the file to the disk and give it its target's name.

        Raises FileExistsError for a target that is there, unless it may be replaced.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        if not replace:
            self._link(self._target)
            return
        if self._name is None:  # a link never replaces anything, and a rename needs a name
            name = _name_beside(self._target, "tmp")
            _own.add(name)
            self._link(name)
            self._name = name
        os.replace(self._name, self._target)

    def _link(self, name: Path) -> None:
        if self._name is not None:
            os.link(self._name, name, follow_symlinks=False)
            return
        # Python takes the system call that can follow the link to an open file only where a directory is given.
        directory = os.open(_OPEN_FILES, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(str(self.file.fileno()), name, src_dir_fd=directory, follow_symlinks=True)
        finally:
            os.close(directory)


@contextlib.contextmanager
def unfinished_directory(target: Path) -> Iterator[Path]:
    """Yield a new, locked directory beside `target`; it is removed at the end unless it was renamed.

    Raises OSError if none can be made. Leftovers of killed processes are the caller's to clear (`abandoned`).
    """
    with locked_directory(target, "tmp") as made:
        _own.add(made)
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)
            _own.discard(made)


@contextlib.contextmanager
def locked_directory(target: Path, kind: Kind) -> Iterator[Path]:
    """Make a directory beside `target` that counts as left once this context, or the process, is over."""
    with contextlib.ExitStack() as lock:
        while True:
            made = _name_beside(target, kind)
            made.mkdir()
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                lock.enter_context(locked(made))
                break
            # Another process came between the two and took it for left: it is removed, or about to be.
        yield made


def abandoned(target: Path) -> Iterator[Path]:
    """Yield each unfinished file and directory beside `target` that no process works on any more, and hold its lock."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.(tmp|old)-[0-9a-f]{{16}}")
    try:
        names = sorted(filter(ours.fullmatch, os.listdir(target.absolute().parent)))
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError), locked(target.with_name(name)):
            yield target.with_name(name)


def kind_of(leftover: Path) -> str:
    """Return the `Kind` that an abandoned name says."""
    return leftover.name.rpartition(".")[2].partition("-")[0]


def remove(leftover: Path) -> None:
    """Remove a file or a directory, or as much of it as can be removed."""
    if leftover.is_dir() and not leftover.is_symlink():
        shutil.rmtree(leftover, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            leftover.unlink()


def remove_own() -> None:
    """Remove this process's unfinished files, because it ends at once."""
    for path in tuple(_own):
        remove(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of this user's file or directory, which ends with the process.

    Raises BlockingIOError if another process holds it, FileNotFoundError for a path that has just gone, and
    PermissionError for another user's file or one that is neither a regular file nor a directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise PermissionError(errno.EPERM, "not a file or directory of this user", str(path))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(found, os.lstat(path)):
            raise FileNotFoundError(errno.ENOENT, "replaced by another", str(path))
        yield
    finally:
        os.close(descriptor)


def _name_beside(target: Path, kind: Kind) -> Path:
    """Return a new name that `abandoned` recognises."""
    return target.with_name(f".{target.name}.{kind}-{secrets.token_hex(8)}")


def _nameless(directory: Path) -> int | None:
    """Open a locked file without a name; None where the file system has none, or where none could be given later."""
    if not hasattr(os, "O_TMPFILE") or not _OPEN_FILES.is_dir():
        return None
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _NO_NAMELESS_FILES:
            return None
        raise
    with contextlib.suppress(OSError):  # where there are no locks, nothing is ever taken for left
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _named(target: Path) -> tuple[Path, int]:
    """Open a locked file with an unfinished name."""
    while True:
        name = _name_beside(target, "tmp")
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _own.add(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = not os.fstat(descriptor).st_nlink
        except BlockingIOError:
            left = True
        except OSError:  # where there are no locks, nothing is ever taken for left
            left = False
        if not left:
            return name, descriptor
        os.close(descriptor)  # another process came between the two and took it for left
        _own.discard(name)
