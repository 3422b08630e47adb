"""The toy kernels of tests/plugins_cuda/emulation, compiled against the emulation once per test process."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins_cuda"
TOYS = Path(__file__).parent / "emulation"
FLAGS = ("-std=c++20", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off")
SCHEDULES = {"forward": 0, "reverse": 1, "shuffled": 2}
_directory = tempfile.TemporaryDirectory(prefix="kvc-toys-")


class Launch(ctypes.Structure):
    """KvcEmulationLaunch of emulation/emulation.h."""

    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("static_shared_bytes", ctypes.c_uint64),
        ("dynamic_shared_bytes", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
    )


class Toys:
    """The loaded library: `run` calls one toy and returns the message of its launch."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def run(self, name: str, *arguments: object) -> str:
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        message = function(*map(_argument, arguments))
        assert message is not None, f"{name}: no such toy"
        return message.decode()

    def call(self, name: str, *arguments: object) -> None:
        function = getattr(self.library, name)
        function.restype = None
        function(*map(_argument, arguments))

    def set_schedule(self, schedule: str, seed: int = 0) -> None:
        assert self.library.kvc_emulation_set_schedule(SCHEDULES[schedule], ctypes.c_uint64(seed)) == 0

    def launches(self) -> list[Launch]:
        count = self.library.kvc_emulation_launches(None, ctypes.c_int64(0))
        records = (Launch * count)()
        self.library.kvc_emulation_launches(records, ctypes.c_int64(count))
        return list(records)

    def clear_launches(self) -> None:
        self.library.kvc_emulation_clear_launches()


def compile_toys(library: Path, *flags: str) -> Path:
    """Compile toys and emulation into `library`, two compilers at a time."""
    units = [*sorted(TOYS.glob("*.cu")), *sorted((PLUGINS / "emulation").glob("*.cpp"))]
    half = [units[::2], units[1::2]]
    objects = [library.with_name(f"{library.stem}-{number}") for number in range(2)]
    for directory in objects:
        directory.mkdir()
    running = [_start(mine, directory, flags) for mine, directory in zip(half, objects, strict=True)]
    for process in running:
        output = process.communicate()[0]
        assert process.returncode == 0, output
    found = [str(path) for directory in objects for path in sorted(directory.glob("*.o"))]
    subprocess.run(["g++", "-shared", *flags, *found, "-o", str(library)], check=True)
    return library


@functools.cache
def toys() -> Toys:
    """The toy library of this process."""
    return Toys(compile_toys(Path(_directory.name) / "libtoys.so", "-O1"))


def aligned(shape: Sequence[int], dtype: object, fill: object = 0) -> np.ndarray:
    """An array that starts at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


def _start(units: list[Path], directory: Path, flags: Sequence[str]) -> subprocess.Popen[str]:
    command = ["g++", *FLAGS, *flags, "-DKVC_EMULATION", f"-I{PLUGINS}", f"-I{PLUGINS / 'include'}"]
    command += [f"-I{TOYS.parent}", "-c", "-x", "c++", *map(str, units)]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _argument(value: object) -> object:
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, str):
        return value.encode()
    return value
