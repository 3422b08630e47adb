"""Write a directory atomically: beside its target first, made durable, then renamed.

A previous directory stays until the new one is complete, and is restored if the last step fails. The next build removes
the directory that a killed process left beside the target, which it recognises by its name and by the missing lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvc_trt.engine.files import is_beside, listing
from kvc_trt.engine.manifest import MANIFEST_FILE
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.atomic import make_durable
from kvc_trt.files.cache import cache_root
from kvc_trt.files.held import HeldFile
from kvc_trt.files.unfinished import abandoned, kind_of, locked_directory, remove, unfinished_directory
from kvc_trt.sizes import readable_size


def check_replaceable(target: Path, entries: frozenset[str]) -> None:
    """Raise InputError unless `target` holds only files of an engine (possibly damaged), whose names are in `entries`.

    `--force` must never delete anything that no build has written.
    """
    if target.is_symlink() or not target.is_dir():
        raise InputError(
            f"{target} exists and is not a directory; --force replaces engine directories only",
            hint="choose another directory with -o",
        )
    names = {entry.name for entry in os.scandir(target) if not is_beside(entry.name)}
    foreign = sorted(names - entries - {MANIFEST_FILE})
    if foreign:
        raise InputError(
            f"{target} holds {foreign[0]!r}, which is not part of an engine; --force replaces engine directories only",
            hint="choose another directory with -o, or move that file away",
        )


def writable_target(target: Path) -> Path:
    """Return `target` with a last component that is a name; InputError if it cannot be created. Changes nothing."""
    if target.name in ("", ".."):
        target = Path(os.path.abspath(target))
    parent = target.absolute().parent
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        raise InputError(f"{target} cannot be made: {parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{target} cannot be made: {parent} is not writable")
    return target


def check_space(target: Path, needed: int) -> None:
    """Raise UnsupportedEnvironment if the disk of the cache or of the target has less than `needed` bytes left.

    This saves hours of work but promises nothing: the disk can still fill up in the meantime.
    """
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    for directory in (cache_root(), parent):
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise UnsupportedEnvironment(
                f"the engine needs {readable_size(needed)}, {directory} has {readable_size(free)} left",
                hint="free some space, or set KVC_TRT_CACHE and -o to a larger disk",
            )


@contextlib.contextmanager
def new_directory(target: Path, *, replaceable: frozenset[str] | None = None) -> Iterator[Path]:
    """Yield an empty directory beside `target` that becomes `target` on a clean exit and is removed otherwise.

    Raises InputError if `target` exists by then, unless it is a directory that holds only names in `replaceable`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(target)
    with unfinished_directory(target) as temporary:
        yield temporary
        for name in listing(temporary):
            make_durable(temporary / name)
        for directory in (*filter(Path.is_dir, temporary.iterdir()), temporary):
            make_durable(directory)
        _put_in_place(temporary, target, replaceable)
        make_durable(target.parent)


def clear_leftovers(target: Path) -> None:
    """Remove directories that killed builds left beside `target`; a previous engine that one set aside is restored."""
    for leftover in abandoned(target):
        if kind_of(leftover) == "old" and (leftover / target.name).is_dir() and not os.path.lexists(target):
            # Killed between the two renames: put the previous engine back.
            os.rename(leftover / target.name, target)
        remove(leftover)


def place(source: HeldFile, destination: Path) -> None:
    """Hard-link a finished file to `destination`, or copy it where links are impossible (across file systems).

    The held file is linked, even if its path leads elsewhere by now.
    """
    destination.parent.mkdir(exist_ok=True)
    descriptor = source.descriptor
    try:
        # Linux links the descriptor's file if it follows this link; src_dir_fd makes Python ask for that.
        os.link(f"/proc/self/fd/{descriptor}", destination, src_dir_fd=descriptor, follow_symlinks=True)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOENT):
            raise
        with source.steady(), destination.open("xb") as file:
            source.copy_to(file.fileno())


def _put_in_place(new: Path, target: Path, replaceable: frozenset[str] | None) -> None:
    if not os.path.lexists(target):
        os.rename(new, target)
        return
    if replaceable is None:
        raise InputError(f"{target} appeared while the engine was being built; nothing was overwritten")
    check_replaceable(target, replaceable)
    with locked_directory(target, "old") as aside:
        try:
            os.rename(target, aside / target.name)
            os.rename(new, target)
        except BaseException:
            if not os.path.lexists(target):
                os.rename(aside / target.name, target)
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
