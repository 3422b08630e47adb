"""Read an engine's files safely: no links, no paths outside the directory, hashed in pieces."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path, PurePosixPath

from kvc_trt.errors import InputError
from kvc_trt.progress import Advance

PIECE = 8 << 20
"""Number of bytes hashed at a time."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def check_name(name: str, source: Path) -> str:
    """Return `name` if it is a plain relative path below the engine directory; InputError otherwise."""
    parts = name.split("/")
    if not all(_NAME.fullmatch(part) for part in parts) or str(PurePosixPath(*parts)) != name:
        raise InputError(f"{source}: {name!r} is not a path inside the engine directory")
    return name


def listing(directory: Path) -> dict[str, int]:
    """Return {relative path: size in bytes} of every file below `directory`.

    Raises InputError for a symbolic link or anything else that is neither a regular file nor a directory.
    """
    found: dict[str, int] = {}
    pending = [directory]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    raise InputError(f"{entry.path} is a symbolic link; engine directories hold none")
                if stat.S_ISDIR(status.st_mode):
                    pending.append(Path(entry.path))
                elif stat.S_ISREG(status.st_mode):
                    found[Path(entry.path).relative_to(directory).as_posix()] = status.st_size
                else:
                    raise InputError(f"{entry.path} is neither a file nor a directory")
    return found


def sha256(path: Path, advance: Advance | None = None) -> str:
    """Return the SHA-256 of a regular file, read in pieces without following a final symbolic link."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(PIECE))
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if advance is not None:
                advance(count)
    return digest.hexdigest()


def read_bytes(path: Path, limit: int) -> bytes:
    """Return a regular file's bytes; InputError when it is missing, a link, or larger than `limit`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise InputError(f"{path}: expected a regular file of at most {limit} bytes, found {status.st_size}")
        return file.read(limit + 1)
