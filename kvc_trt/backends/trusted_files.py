"""Check who can write a file that is about to be executed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvc_trt.errors import UnsupportedEnvironment


def check_writers(path: Path) -> None:
    """Raise UnsupportedEnvironment unless only this user and root can change an existing file and its folder."""
    real = path.resolve()
    for place in (real, real.parent):
        status = place.stat()
        sticky = bool(status.st_mode & stat.S_ISVTX)
        problem = untrusted(status.st_uid, stat.S_IMODE(status.st_mode), os.geteuid(), sticky=sticky)
        if problem is not None:
            raise UnsupportedEnvironment(
                f"{place} {problem}; expected a library that nobody else can change",
                hint=f"chmod go-w {place}, or take the library from a place of your own",
            )


def untrusted(owner: int, mode: int, user: int, *, sticky: bool = False) -> str | None:
    """Return the reason why `user` must not load code with this owner and mode; None if it is trusted."""
    if owner not in (user, 0):
        return f"belongs to user {owner}"
    if mode & stat.S_IWOTH and not sticky:
        return "can be written by everybody"
    if mode & stat.S_IWGRP and not sticky and owner == 0:
        return "can be written by a group"
    return None
