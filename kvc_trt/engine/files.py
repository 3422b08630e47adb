"""The names in an engine directory: plain ones, no links, no paths outside the directory."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path, PurePosixPath

from kvc_trt.errors import InputError
from kvc_trt.files.held import HeldFile

VERIFICATION_FILE = "verification.json"
"""Says how an engine was verified (`verification.py`). It is no part of the engine: nothing that runs depends on it."""
_RECORDS = re.compile(rf"{re.escape(VERIFICATION_FILE)}|\.{re.escape(VERIFICATION_FILE)}\.tmp-[0-9a-f]{{16}}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def check_name(name: str, source: Path) -> str:
    """Return `name` if it is a plain relative path below the engine directory; InputError otherwise."""
    parts = name.split("/")
    if not all(_NAME.fullmatch(part) for part in parts) or str(PurePosixPath(*parts)) != name:
        raise InputError(f"{source}: {name!r} is not a path inside the engine directory")
    return name


def is_beside(name: str) -> bool:
    """Return whether a file of this name may lie in an engine directory and is no part of the engine."""
    return _RECORDS.fullmatch(name) is not None


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


def sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a regular file, read in pieces without following a final symbolic link."""
    return HeldFile(path).compute_digest()
