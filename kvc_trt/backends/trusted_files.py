"""Check who can write a file that is about to be executed."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from kvc_trt.errors import UnsupportedEnvironment


def check_writers(path: Path) -> None:
    """Raise UnsupportedEnvironment unless only this user and root can change an existing file and its folder.

    A group may write what the user owns if nobody else is in it, as with a umask of 002 and a group for each user."""
    real = path.resolve()
    for place in (real, real.parent):
        status = place.stat()
        sticky = bool(status.st_mode & stat.S_ISVTX)
        mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
        problem = untrusted(status.st_uid, mode, user, sticky=sticky, group_has_others=has_others(status.st_gid, user))
        if problem is not None:
            raise UnsupportedEnvironment(
                f"{place} {problem}; expected a library that nobody else can change",
                hint=f"chmod go-w {place}, or take the library from a place of your own",
            )


def has_others(group: int, user: int) -> bool:
    """Tell whether the system knows anyone in a group beside the user and root."""
    try:
        named = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        named = set()
    accounts = [one for one in pwd.getpwall() if one.pw_gid == group or one.pw_name in named]
    unknown = named - {one.pw_name for one in accounts}
    return bool(unknown) or any(one.pw_uid not in (user, 0) for one in accounts)


def untrusted(owner: int, mode: int, user: int, *, sticky: bool = False, group_has_others: bool = False) -> str | None:
    """Return the reason why `user` must not load code with this owner and mode; None if it is trusted.

    `group_has_others` says that the file's group has members beside the user and root; what root owns, no group may
    write."""
    if owner not in (user, 0):
        return f"belongs to user {owner}"
    if mode & stat.S_IWOTH and not sticky:
        return "can be written by everybody"
    if mode & stat.S_IWGRP and not sticky and (owner == 0 or group_has_others):
        return "can be written by a group"
    return None
