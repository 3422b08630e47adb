"""Directories that each belong to one running process; a later process removes those whose owner was killed.

Each directory has a file that identifies its owner: the boot of the machine, the namespace of process numbers, the
number, and the start time of the process. Another process can tell that the owner is gone only if the first two equal
its own, and removes nothing otherwise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_whole
from kvc_trt.files.inputs import read_input

OWNER_FILE = "owner"
_LARGEST_OWNER = 256
_PROC = Path("/proc")


def owner() -> str:
    """Return the text that identifies this process; empty if the system does not provide it."""
    return _described(os.getpid()) or ""


def is_gone(described: str) -> bool:
    """Return whether the process with this text of `owner` has certainly ended."""
    fields, own = described.split(), owner().split()
    if len(fields) != len(own) or not own or fields[:2] != own[:2] or not fields[2].isdecimal():
        return False
    return _described(int(fields[2])) != " ".join(fields)


def runs(pid: int) -> bool:
    """Return whether there is a process with this number."""
    return (_PROC / str(pid)).exists()


def own_directory(parent: Path, prefix: str) -> Path:
    """Make a private directory PARENT/PREFIX..., which this process removes when it ends."""
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    write_whole(made / OWNER_FILE, owner().encode())
    return made


def remove_abandoned(parent: Path, prefix: str) -> list[int]:
    """Remove the directories PARENT/PREFIX... of this user whose processes are gone; return these processes' numbers.

    No link is followed, neither in place of a directory nor within one.
    """
    gone = []
    for path in parent.glob(f"{prefix}*"):
        described = _owner_of(path)
        if described is not None and is_gone(described):
            shutil.rmtree(path, ignore_errors=True)
            gone.append(int(described.split()[2]))
    return gone


def _owner_of(path: Path) -> str | None:
    """Return the text of `owner` in a directory; None if it is not a directory of this user, or has no such file."""
    with contextlib.suppress(InputError, OSError, UnicodeDecodeError):
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            return read_input(path / OWNER_FILE, _LARGEST_OWNER, follow_links=False).decode("ascii")
    return None


def _described(pid: int) -> str | None:
    """Return the text that identifies a running process; None if it does not run, or the system does not say."""
    try:
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        namespace = os.readlink(_PROC / "self" / "ns" / "pid")
        # The name, which may hold anything, is in brackets; after it come the state and, as the 20th, the start.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot} {namespace} {pid} {fields[19]}"
