"""Native operators: a library of custom operators in C++ (plugins_cpu/) that ONNX Runtime runs instead of the bodies.

The library is optional. Its operators replace the functions of the same name in a graph. All other operators, and all
operators of engines whose activations are not float32, run their bodies, which remain the specification.

A library is executable code, so it is loaded only from KVC_TRT_CPU_KERNELS, from the package's `lib` folder, or from
the `build` folder of the checkout that the package runs from.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.backends.trusted_files import check_writers
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.operators.native import interface

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

VARIABLE = "KVC_TRT_CPU_KERNELS"
NONE = "none"
INSTRUCTIONS = ("avx512bf16", "avx512vnni", "avx512", "avx2", "portable")
"""Instruction sets that a library may have, best first."""
BF16 = "avx512bf16"
"""The instruction set that multiplies bfloat16."""
_PACKAGE = Path(__file__).resolve().parents[2]
_CHECKOUT = _PACKAGE.parent
_NAME = "libkvc_cpu.so"


@dataclass(frozen=True)
class NativeOperators:
    """A loaded library of native operators."""

    path: Path
    operators: frozenset[str]
    """The names of the operators that it computes."""

    @property
    def instructions(self) -> str:
        """The instruction set in use."""
        return _text(_loaded(self.path).kvc_cpu_instructions)

    def use_instructions(self, name: str) -> None:
        """Use another instruction set in every session of the process; ValueError if the library cannot use it here."""
        if not _loaded(self.path).kvc_cpu_use_instructions(name.encode()):
            raise ValueError(f"{self.path} has no {name} for this processor; expected {' or '.join(INSTRUCTIONS)}")

    def register(self, options: SessionOptions) -> None:
        """Make the operators available to sessions with these options."""
        options.register_custom_ops_library(str(self.path))

    @property
    def digest(self) -> str:
        """The SHA-256 of the library, by which measurements of different builds are distinguished."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def describe(self) -> str:
        """Return a short description with the instruction set in use, for messages of commands."""
        return f"native operators ({self.instructions})"


def native_operators(dtype: str = "float32") -> NativeOperators | None:
    """Return the library to use for activations of this type; None if the operators' bodies run.

    Raises UnsupportedEnvironment for a library that the user names and that cannot be used.
    """
    path = library_path()
    return None if path is None or dtype != "float32" else load(path)


def library_path() -> Path | None:
    """Return the library to use, or None. The file is not read.

    UnsupportedEnvironment for a library that the user names by a relative path, or that other users can change.
    """
    named = os.environ.get(VARIABLE)
    if named == NONE:
        return None
    if named:
        if not os.path.isabs(named):
            raise UnsupportedEnvironment(f"{VARIABLE} is {named!r}; expected an absolute path or {NONE!r}")
        path = Path(named)
        if path.is_file():
            check_writers(path)
        return path
    places = [_PACKAGE / "lib" / _NAME]
    if _in_checkout():
        places.append(_CHECKOUT / "build" / _NAME)
    return next((place for place in places if place.is_file()), None)


def _in_checkout() -> bool:
    return (_CHECKOUT / "plugins_cpu").is_dir()


def describe_choice() -> str:
    """Return one line on the library that an engine with float32 activations would use, and the reason for it."""
    try:
        found = native_operators()
    except UnsupportedEnvironment as error:
        return f"unusable: {error}"
    if found is not None:
        operators = {name.partition("_")[0] for name in found.operators}  # without one name for each cache format
        return f"{found.path}: {len(operators)} operators, {found.instructions}"
    return "none, the operators' bodies run" + (f" ({VARIABLE}={NONE})" if os.environ.get(VARIABLE) else "")


def how_to_get() -> str | None:
    """Return the command that installs the library; None if there is one, or if the user wants none."""
    if os.environ.get(VARIABLE) or library_path() is not None:
        return None
    command = "make native" if _in_checkout() else "pip install --force-reinstall --no-deps ., in kvc-trt's sources"
    return f"{command}; with a C++ compiler this brings the native operators, which are faster (docs/native.md)"


@cache
def load(path: Path) -> NativeOperators:
    """Load a library, once per process; UnsupportedEnvironment if it cannot be used."""
    library = _loaded(path)
    return NativeOperators(path, frozenset(_text(library.kvc_cpu_operators).split()))


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    hint = "build it again (make native), or set " + f"{VARIABLE}={NONE}"
    if not path.is_file():
        raise UnsupportedEnvironment(f"{path}: no native operators there", hint=f"set {VARIABLE}={NONE}")
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        found = library.kvc_cpu_interface()
    except (OSError, AttributeError) as error:
        raise UnsupportedEnvironment(f"{path} holds no native operators: {error}", hint=hint) from error
    if found != interface():
        raise UnsupportedEnvironment(f"{path} has interface {found}; expected {interface()}", hint=hint)
    for name in ("kvc_cpu_operators", "kvc_cpu_instructions"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


def _text(function: ctypes._NamedFuncPointer) -> str:
    answer: bytes = function()
    return answer.decode("ascii")
