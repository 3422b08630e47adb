"""Files that exist whole or not at all: written beside their target, made durable, then given its name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.unfinished import UnfinishedFile, abandoned, remove, unfinished_directory

OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path`, making its directory; an existing file is replaced only when all of the new one is
    written.

    Raises UnsupportedEnvironment for a disk that is full or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, [content], replace=True)
    except OSError as error:
        raise disk_error(error, f"writing {path}") from error


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """`write_whole` of a JSON document; NaN and infinities are refused (they are not JSON)."""
    write_whole(path, json_bytes(document))


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """Return a JSON document as a file has it; ValueError for NaN and infinities, which are not JSON."""
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


def write_new_file(path: Path, text: str, *, replace: bool) -> None:
    """Write `text` to `path` in an existing directory; otherwise like `write_new_pieces`."""
    write_new_pieces(path, [text.encode()], replace=replace)


def write_new_pieces(path: Path, pieces: Iterable[bytes | memoryview], *, replace: bool) -> None:
    """Write the pieces, one after the other, to `path` in an existing directory.

    Raises InputError where `check_new_file` does, also for a file that appears at `path` meanwhile;
    UnsupportedEnvironment for a disk that is full or cannot be written.
    """
    check_new_file(path, replace=replace)
    try:
        _write(path, pieces, replace=replace)
    except FileExistsError:
        check_new_file(path, replace=replace)
        raise
    except OSError as error:
        raise disk_error(error, f"writing {path}") from error


def check_new_file(path: Path, *, replace: bool) -> None:
    """InputError where `write_new_file` would refuse `path`, so that work is not done for nothing."""
    if path.is_dir():
        raise InputError(f"{path} is a directory; expected the name of a file")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file and is not replaced")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path} cannot be made: {path.parent} is not a directory")
    if os.path.lexists(path) and not replace:
        raise InputError(f"{path} exists and is not replaced", hint="--force, or another -o FILE")


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and force it to the disk; FileExistsError where there is one.

    It can be left half-written, so it belongs into a directory that is not finished either.
    """
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def files_together(directory: Path, last: str) -> Iterator[Path]:
    """Yield an empty directory whose files move into `directory` on a clean exit, the one named `last` as the last.

    That one is the sign that all are there: an old one goes before the others are replaced, so files of two writes
    never stand beside it. `directory` is made where there is none. Raises UnsupportedEnvironment for a full disk.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in abandoned(directory / last):
            remove(leftover)
        with unfinished_directory(directory / last) as new:
            yield new
            names = sorted(os.listdir(new), key=lambda name: (name == last, name))
            for name in names:
                make_durable(new / name)
            (directory / last).unlink(missing_ok=True)
            for name in names:
                os.replace(new / name, directory / name)
            make_durable(directory)
    except OSError as error:
        raise disk_error(error, f"writing {directory}") from error


def write_together(directory: Path, files: Mapping[str, bytes]) -> None:
    """Put files into a directory, by name, with the last of them as the sign that all are there (`files_together`)."""
    with files_together(directory, list(files)[-1]) as new:
        for name, content in files.items():
            (new / name).write_bytes(content)


def make_durable(path: Path) -> None:
    """Force a finished file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(error: OSError, doing: str) -> UnsupportedEnvironment:
    """Turn a failed write into the user's error; a full disk is named as such."""
    if error.errno in OUT_OF_SPACE:
        return UnsupportedEnvironment(
            f"no space left while {doing}: {error.strerror}",
            hint="free some space, then repeat the command",
        )
    return UnsupportedEnvironment(f"failed while {doing}: {error.strerror or error}")


def _write(path: Path, pieces: Iterable[bytes | memoryview], *, replace: bool) -> None:
    with UnfinishedFile(path) as new:
        for piece in pieces:
            new.file.write(piece)
        new.finish(replace=replace)
