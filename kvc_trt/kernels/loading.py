"""Find the kernel library to call: the caller's choice, KVC_TRT_KERNELS, or the one in the package's `lib` folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.kernels.c_library import CLibrary, KernelLibraryError

if TYPE_CHECKING:
    from kvc_trt.kernels.library import KernelLibrary

VARIABLE = "KVC_TRT_KERNELS"
PACKAGED = Path(__file__).resolve().parents[1] / "lib" / "libkvc_kernels.so"

_in_use: list[Path] = []


def library_path() -> tuple[Path, str] | None:
    """Return the path of the library to call and who chose it, or None. The file is not read."""
    if _in_use:
        return _in_use[-1], "chosen by the caller"
    named = os.environ.get(VARIABLE)
    if named:
        if not os.path.isabs(named):
            raise KernelLibraryError(f"{VARIABLE} is {named!r}; expected an absolute path")
        return Path(named), VARIABLE
    return (PACKAGED, "part of the package") if PACKAGED.is_file() else None


def current_library() -> KernelLibrary | None:
    """Load and return the library to call, or None. Raises KernelLibraryError if it cannot be used."""
    found = library_path()
    return None if found is None else load(found[0])


def current_c_library() -> CLibrary | None:
    """Like `current_library`, but without PyTorch, for callers that pass addresses."""
    found = library_path()
    return None if found is None else _load_c(found[0])


@contextlib.contextmanager
def use_library(path: str | PathLike[str]) -> Iterator[KernelLibrary]:
    """Use this library inside the block, in all threads of the process, regardless of the environment."""
    library = load(Path(path).absolute())
    _in_use.append(library.path)
    try:
        yield library
    finally:
        _in_use.pop()


@cache
def _load_c(path: Path) -> CLibrary:
    return CLibrary(path)


@cache
def load(path: Path) -> KernelLibrary:
    """Load the library at `path`, once per process: the system never unloads it anyway."""
    from kvc_trt.kernels.library import KernelLibrary

    return KernelLibrary(path)
