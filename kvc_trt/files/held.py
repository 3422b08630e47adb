"""A file that is hashed, read and mapped through one descriptor, so that the checked bytes are the ones used.

Whoever may write to the file can still change it in place. A whole read is compared with the hash, and `steady` refuses
a file that was written while a runtime read it; only a sealed copy in memory cannot be changed later.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.inputs import open_input
from kvc_trt.files.lost import MAPPINGS
from kvc_trt.progress import Advance

PIECE = 8 << 20
"""The number of bytes hashed at a time."""
CLOCK_TICK = 0.02
"""Seconds within which two writes can have the same time; kernels count in ticks of 10 ms at most."""

Status = tuple[int, int, int, int]
"""Inode, size, time of the last write and of the last change of a file."""


@dataclass(frozen=True)
class LentFile:
    """A file that is held here, for a process that is given its descriptor under the same number."""

    path: Path
    descriptor: int
    digest: str | None
    hint: str | None
    status: Status | None


class HeldFile:
    """A regular file, opened when it is first used and held from then on; its path is for messages.

    With `digest`, an SHA-256 in hex, every opening checks the content. `sealed` copies the file into memory that nobody
    can write, and reads that. Raises InputError, with the `hint`, for a file that is not what it should be, and
    UnsupportedEnvironment where the system has no sealed memory. Not safe for use from several threads at once.
    """

    def __init__(
        self, path: str | Path, digest: str | None = None, *, sealed: bool = False, hint: str | None = None
    ) -> None:
        self.path = Path(path)
        self.digest, self.sealed, self.hint = digest, sealed, hint
        self._descriptor: int | None = None
        self._status: Status | None = None
        self._closing: weakref.finalize[[int], HeldFile] | None = None

    @classmethod
    def borrowed(cls, lent: LentFile) -> HeldFile:
        """Return a file that another process has opened and checked, and whose descriptor this one was given."""
        file = cls(lent.path, lent.digest, hint=lent.hint)
        file._hold(lent.descriptor)
        os.set_inheritable(lent.descriptor, False)
        file._status = lent.status
        return file

    def lend(self) -> LentFile:
        """Return the data with which another process that inherits the descriptor can use this file."""
        return LentFile(self.path, self.descriptor, self.digest, self.hint, self._status)

    def __repr__(self) -> str:
        return f"HeldFile({str(self.path)!r})"

    def __reduce__(self) -> tuple[type[HeldFile], tuple[str]]:
        if self._descriptor is not None:
            raise TypeError(f"{self.path} is open: another process is given its descriptor")
        return type(self), (str(self.path),)

    @property
    def descriptor(self) -> int:
        """The number of the open file."""
        if self._descriptor is None:
            self.open()
        assert self._descriptor is not None
        return self._descriptor

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    def open(self, advance: Advance | None = None) -> None:
        """Open the file, unless it is held already, and check its content.

        `advance` is called with the number of bytes read since its last call.
        """
        if self._descriptor is not None:
            return
        with open_input(self.path, follow_links=False) as file:
            descriptor = os.dup(file.fileno())
        self._hold(descriptor)
        try:
            if self.sealed:
                self._hold(self._sealed_copy(descriptor))
            if self.digest is not None:
                self._check_content(advance)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Mappings stay; a later use opens and checks the file again."""
        if self._closing is not None:
            self._closing()
        self._descriptor = self._closing = self._status = None

    def compute_digest(self, advance: Advance | None = None) -> str:
        """Return the SHA-256 (hex) of the bytes as they are now."""
        digest, position = hashlib.sha256(), 0
        while piece := os.pread(self.descriptor, PIECE, position):
            digest.update(piece)
            position += len(piece)
            if advance is not None:
                advance(len(piece))
        return digest.hexdigest()

    def read(self, largest: int | None = None) -> bytes:
        """Return all bytes, `largest` at most, and exactly those that were checked if there is a digest."""
        size, pieces, position = self.size, [], 0
        if largest is not None and size > largest:
            raise InputError(f"{self.path}: {size} B; expected at most {largest} B", hint=self.hint)
        while position < size and (piece := os.pread(self.descriptor, size - position, position)):
            pieces.append(piece)
            position += len(piece)
        content = b"".join(pieces)
        if self.digest is not None and hashlib.sha256(content).hexdigest() != self.digest:
            raise self._changed("after it was checked")
        return content

    def copy_to(self, descriptor: int) -> None:
        """Write all bytes to an open file."""
        _copy(self.descriptor, descriptor)

    def map(self, *, private_writes: bool = False) -> mmap.mmap:
        """Map the file for reading; with `private_writes`, also for writing to copies of its pages."""
        import numpy as np

        protection = mmap.PROT_READ | (mmap.PROT_WRITE if private_writes else 0)
        try:
            mapping = mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE, prot=protection)
        except (OSError, ValueError) as error:  # an empty file
            raise InputError(f"cannot map {self.path}: {error}", hint=self.hint) from error
        address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        MAPPINGS[address] = len(mapping), self.path
        weakref.finalize(mapping, MAPPINGS.pop, address, None).atexit = False
        return mapping

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Refuse, at the end of the block, a file that was changed while the block read it.

        A file that was touched before the block is checked again first: a new link, for one, changes no byte.
        """
        descriptor = self.descriptor
        if _status(descriptor) != self._status:
            self._check_content(None)
        yield
        if _status(descriptor) != self._status:
            raise self._changed("while it was being loaded")

    def _hold(self, descriptor: int) -> None:
        if self._closing is not None:
            self._closing()
        self._descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)
        self._closing.atexit = False

    def _check_content(self, advance: Advance | None) -> None:
        """Compare the content with the digest, and note the status that belongs to it."""
        descriptor = self.descriptor
        self._status = _settled_status(descriptor)
        if self._status is None:
            raise self._changed("again and again while it was being checked")
        if self.digest is not None and (found := self.compute_digest(advance)) != self.digest:
            expected = f"expected SHA-256 {self.digest}, found {found}"
            raise InputError(f"{self.path} was changed: {expected}", hint=self.hint)
        if _status(descriptor) != self._status:
            raise self._changed("while it was being checked")

    def _changed(self, when: str) -> InputError:
        return InputError(f"{self.path} was changed {when}", hint=self.hint)

    def _sealed_copy(self, source: int) -> int:
        """Return the descriptor of a copy in memory that can only be read."""
        if not hasattr(os, "memfd_create"):
            raise UnsupportedEnvironment(
                f"{self.path}: this system has no memory that can be sealed", hint="leave out --sealed"
            )
        try:
            copy = os.memfd_create(self.path.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                _copy(source, copy)
                seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
                # A descriptor for reading alone: older kernels map no other one of a sealed file for sharing.
                return os.open(f"/proc/self/fd/{copy}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(copy)
        except OSError as error:
            raise UnsupportedEnvironment(
                f"cannot keep a sealed copy of {self.path} in memory: {error.strerror}", hint="leave out --sealed"
            ) from error


def _copy(source: int, copy: int) -> None:
    position = 0
    while piece := os.pread(source, PIECE, position):
        position += len(piece)
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(copy, rest) :]


def _status(descriptor: int) -> Status:
    found = os.fstat(descriptor)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _settled_status(descriptor: int) -> Status | None:
    """Return the status once the last change is so old that the next one has another time; None if it never is."""
    for _ in range(20):
        if not 0 <= time.time() - os.fstat(descriptor).st_ctime < CLOCK_TICK:
            return _status(descriptor)
        time.sleep(CLOCK_TICK / 4)
    return None
