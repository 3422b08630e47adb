"""Open the files that a user or a stranger names.

Nothing else in this package opens such a file. A file is checked and used through one descriptor, so the checked bytes
are the ones read, and a pipe or a device never blocks: both are refused. Whoever may write a file in place can still
change it while it is read; `docs/security.md` explains this.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError
from kvc_trt.sizes import readable_size

_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_NOT_REGULAR = "write its content to a file first, and name that"
_PIECE = 4 << 20


def open_input(
    path: str | Path, largest: int | None = None, *, follow_links: bool = True, hint: str | None = None
) -> io.FileIO:
    """Open a regular file for reading, unbuffered; the caller closes it.

    `largest` is the most bytes it may have; without `follow_links` a final symbolic link is refused.
    Raises InputError, with `hint`, for a path that cannot be opened, is not a regular file, or is larger.
    """
    descriptor = _open(path, os.O_RDONLY | (0 if follow_links else os.O_NOFOLLOW), largest, hint, "read")
    return io.FileIO(descriptor, "rb", closefd=True)


def open_appended(path: str | Path, largest: int, *, hint: str | None = None) -> io.BufferedRandom:
    """Open a regular file, created if it does not exist, to read it and to append to it; the caller closes it.

    Raises InputError as `open_input` does.
    """
    descriptor = _open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, largest, hint, "write")
    return io.BufferedRandom(io.FileIO(descriptor, "rb+", closefd=True))


def read_input(path: str | Path, largest: int, *, follow_links: bool = True, hint: str | None = None) -> bytes:
    """Return the bytes of a regular file; InputError where `open_input` raises it, or where it grows meanwhile."""
    with open_input(path, largest, follow_links=follow_links, hint=hint) as file, io.BufferedReader(file) as reader:
        try:
            content = reader.read(largest + 1)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    if len(content) > largest:
        raise InputError(f"{path}: grew beyond {readable_size(largest)} while it was read")
    return content


def read_text_input(path: str | Path, largest: int, *, hint: str | None = None) -> str:
    """Return the text of a UTF-8 file; the InputErrors of `read_input`, and one at the first byte that is not UTF-8."""
    return decoded_text(read_input(path, largest, hint=hint), path, hint=hint)


def decoded_text(content: bytes, source: str | Path, *, hint: str | None = None) -> str:
    """Return the text of the content of `source`; InputError at the first byte that is not valid UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is 0x{content[error.start]:02x}"
        raise InputError(f"{source} is not UTF-8 text: {found}", hint=hint) from error


def read_json_input(path: str | Path, largest: int, *, follow_links: bool = True, hint: str | None = None) -> Any:
    """Return the value in a JSON file; the InputErrors of `read_input`, and one for a file that is not JSON."""
    return parsed_json(read_input(path, largest, follow_links=follow_links, hint=hint), path, hint=hint)


def parsed_json(content: bytes | str, source: str | Path, *, hint: str | None = None) -> Any:
    """Parse the content of the JSON file `source`; InputError if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not valid JSON: {error}", hint=hint) from error


def sha256_of_input(path: str | Path, *, follow_links: bool = True) -> str:
    """Return the SHA-256 (hex) of a regular file, which is read in pieces; the InputErrors of `open_input`."""
    digest = hashlib.sha256()
    with open_input(path, follow_links=follow_links) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _open(path: str | Path, flags: int, largest: int | None, hint: str | None, purpose: str) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except (OSError, ValueError) as error:  # ValueError: a null byte, or a lone surrogate, in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot {purpose} {path}: {reason}", hint=hint) from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (largest is None or status.st_size <= largest):
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        kind = stat.S_IFMT(status.st_mode)
        found = f"{_KINDS.get(kind, 'something else')}; expected a regular file"
        raise InputError(f"{path}: {found}", hint=_NOT_REGULAR if kind == stat.S_IFIFO else hint)
    assert largest is not None
    sizes = [readable_size(status.st_size), readable_size(largest)]
    if sizes[0] == sizes[1]:
        sizes = [f"{status.st_size} B", f"{largest} B"]
    raise InputError(f"{path}: {sizes[0]}; expected at most {sizes[1]}", hint=hint)
