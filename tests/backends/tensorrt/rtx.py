"""NVIDIA's parser and builder, for tests: the wheels of TensorRT-RTX are the only ones on PyPI that bring both.

They work on a CPU up to the finished plan, and are an oracle for graphs and plugins, never a target. `load()` is the
one place that knows how to bring them up; everything else takes the module that it returns.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BINDINGS, LIBRARIES = "tensorrt_rtx_bindings", "tensorrt_rtx_libs"


def missing() -> str | None:
    """Return the reason why the parser cannot be asked here; None if it can."""
    if importlib.util.find_spec(BINDINGS) is None or importlib.util.find_spec(LIBRARIES) is None:
        return "no TensorRT-RTX in this Python: pip install '.[tensorrt-rtx]'"
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        return "TensorRT-RTX is not built for AddressSanitizer"
    return None


def load_or_skip() -> ModuleType:
    """Return the module, or a skipped test that says why."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    return load()


@cache
def load() -> ModuleType:
    """Return the module of the bindings, an API of the same shape as `tensorrt`."""
    _preload_alias()
    return importlib.import_module(BINDINGS)


def as_tensorrt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`import tensorrt` gives the RTX module until the test ends: for code that imports TensorRT itself."""
    import sys

    module = load_or_skip()
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module


def _preload_alias() -> None:
    """The parser opens libtensorrt_rtx.so, a name that the wheel does not have; without it the process dies.

    A link to the library under that name is not enough, the loader recognises the file: so an empty library with that
    name, which needs the real one.
    """
    spec = importlib.util.find_spec(LIBRARIES)
    assert spec is not None
    library = Path(next(iter(spec.submodule_search_locations or ()))) / "libtensorrt_rtx.so.1"
    with tempfile.TemporaryDirectory() as work:
        alias = Path(work) / "alias.so"
        link = ["-Wl,-soname,libtensorrt_rtx.so", "-Wl,--no-as-needed", f"-Wl,-rpath,{library.parent}"]
        empty = ["-x", "c", "/dev/null", "-x", "none"]
        subprocess.run(["gcc", "-shared", *link, "-o", alias, *empty, library], check=True)
        ctypes.CDLL(str(alias))


def describe(tensor: Any) -> tuple[tuple[int, ...], str]:
    """(shape, type) of a network tensor; -1 for a dimension that is open."""
    return tuple(tensor.shape), tensor.dtype.name
