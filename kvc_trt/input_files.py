"""Open the files that a user or a stranger names.

Nothing else in this package opens such a file. A file is checked and used through one descriptor, so what was checked
is what is read, and a pipe or a device never blocks: both are refused. Whoever may write a file in place can still
change it while it is read; `docs/security.md` says what that means.
"""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError
from kvc_trt.sizes import readable_size

_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_input(path: str | Path, largest: int | None = None, *, follow_links: bool = True) -> io.FileIO:
    """Open a regular file for reading, unbuffered; the caller closes it.

    `largest` is the most bytes it may have; without `follow_links` a final symbolic link is refused.
    Raises InputError for whatever cannot be opened, is not a regular file, or is larger.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:  # a null byte, or a lone surrogate, in the name
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    status = os.fstat(descriptor)
    problem = _problem(status, largest)
    if problem is not None:
        os.close(descriptor)
        raise InputError(f"{path}: {problem}")
    return io.FileIO(descriptor, "rb", closefd=True)


def read_input(path: str | Path, largest: int, *, follow_links: bool = True) -> bytes:
    """Return the bytes of a regular file; InputError where `open_input` raises it, or where it grows meanwhile."""
    with open_input(path, largest, follow_links=follow_links) as file, io.BufferedReader(file) as reader:
        try:
            content = reader.read(largest + 1)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > largest:
        raise InputError(f"{path}: grew beyond {readable_size(largest)} while it was read")
    return content


def read_text_input(path: str | Path, largest: int) -> str:
    """Return the text of a UTF-8 file; InputError where `read_input` raises it, or for the first byte that is not."""
    content = read_input(path, largest)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is 0x{content[error.start]:02x}"
        raise InputError(f"{path} is not UTF-8 text: {found}") from error


def read_json_input(path: str | Path, largest: int, *, follow_links: bool = True, hint: str | None = None) -> Any:
    """Return what a JSON file holds; InputError where `read_input` raises it, or for what is not JSON."""
    content = read_input(path, largest, follow_links=follow_links)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}", hint=hint) from error


def _problem(status: os.stat_result, largest: int | None) -> str | None:
    """Return why a file is not read; None if it is."""
    if not stat.S_ISREG(status.st_mode):
        return f"{_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}; expected a regular file"
    if largest is not None and status.st_size > largest:
        return f"{readable_size(status.st_size)}; expected at most {readable_size(largest)}"
    return None
