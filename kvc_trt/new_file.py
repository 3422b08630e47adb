"""A small file that exists whole or not at all, and replaces nothing unasked."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvc_trt.engine.files import disk_error
from kvc_trt.errors import InputError


def write_new_file(path: Path, text: str, *, replace: bool) -> None:
    """Write `text` beside `path`, make it durable, then give it that name.

    Raises InputError where something stands at `path` (a directory always, a file unless `replace`);
    UnsupportedEnvironment where the disk refuses.
    """
    check_new_file(path, replace=replace)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise disk_error(error, f"writing {path}") from error
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path, follow_symlinks=False)  # unlike a rename it fails where something appeared
    except FileExistsError:
        check_new_file(path, replace=replace)
        raise
    except OSError as error:
        raise disk_error(error, f"writing {path}") from error
    finally:
        temporary.unlink(missing_ok=True)


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


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
