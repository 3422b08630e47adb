"""The private cache directory of this user: `~/.cache/kvc-trt`, or `$KVC_TRT_CACHE`."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.files.unfinished import abandoned, remove, unfinished_directory


def cache_root() -> Path:
    """Return the private cache directory, created with mode 0700.

    UnsupportedEnvironment if others can write to it, or if the user has no home directory.
    """
    chosen = os.environ.get("KVC_TRT_CACHE")
    root = Path(chosen) if chosen else _caches() / "kvc-trt"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        message = f"cannot make the cache directory {root}: {error.strerror}"
        raise UnsupportedEnvironment(message, hint="set KVC_TRT_CACHE to a directory you may write") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        message = f"the cache {root} must be a directory of yours that nobody else may write"
        raise UnsupportedEnvironment(message, hint=f"chmod 700 {root}, or set KVC_TRT_CACHE to another directory")
    return root


def _caches() -> Path:
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        message = "this user has no home directory for a cache"
        raise UnsupportedEnvironment(message, hint="set KVC_TRT_CACHE to a directory you may write") from error


@contextlib.contextmanager
def scratch_directory(purpose: str) -> Iterator[Path]:
    """Yield an empty directory in the cache, which is removed at the end; so are those that killed processes left."""
    root = cache_root() / "scratch"
    root.mkdir(mode=0o700, exist_ok=True)
    for leftover in abandoned(root / purpose):
        remove(leftover)
    with unfinished_directory(root / purpose) as directory:
        yield directory
