"""The toy kernels of tests/plugins_cuda/emulation, compiled against the emulation once for all test processes."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvc_trt.kernels.c_library import SCHEDULES as ORDERS
from kvc_trt.kernels.structs import EmulatedExecutions, EmulatedLaunch
from tests.plugins_cuda.build import host_objects, made_once

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins_cuda"
TOYS = Path(__file__).parent / "emulation"
FLAGS = (
    *("-std=c++20", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off"),
    "-fno-gnu-unique",  # two libraries in one process share no static variable of a template
)
INSTRUMENTED = {
    "races": ("-fsanitize=thread",),
    "clusters": ("-fsanitize=thread",),
    "mbarriers": ("-fsanitize=thread",),
    "executions": ("-fsanitize-coverage=trace-pc",),
}
"""Toys that the compiler makes report their accesses, or the pieces that they run."""
SCHEDULES = {name: number for number, name in enumerate(ORDERS)}


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

    def set_device(self, architecture: str) -> None:
        assert self.library.kvc_emulation_set_device(architecture.encode()) == 0

    def launches(self) -> list[EmulatedLaunch]:
        count = self.library.kvc_emulation_launches(None, ctypes.c_int64(0))
        records = (EmulatedLaunch * count)()
        self.library.kvc_emulation_launches(records, ctypes.c_int64(count))
        return list(records)

    def executions(self) -> list[EmulatedExecutions]:
        count = self.library.kvc_emulation_executions(None, ctypes.c_int64(0))
        records = (EmulatedExecutions * count)()
        self.library.kvc_emulation_executions(records, ctypes.c_int64(count))
        return list(records)

    def clear_launches(self) -> None:
        self.library.kvc_emulation_clear_launches()


def compile_toys(directory: Path, *flags: str) -> None:
    """Compile toys into `directory`: libtoys.so, and a library of its own for each of INSTRUMENTED."""
    jobs = {"toys": [TOYS / f"{name}.cu" for name in ("blocks", "limits", "mistakes", "mma", "numeric", "selection")]}
    jobs |= {name: [TOYS / f"{name}.cu"] for name in INSTRUMENTED}
    running = []
    for job, units in jobs.items():
        (directory / job).mkdir()
        running.append(_start(units, directory / job, (*flags, *INSTRUMENTED.get(job, ()))))
    for process in running:
        output = process.communicate()[0]
        assert process.returncode == 0, output
    for kernels in ("toys", *INSTRUMENTED):
        objects = [*(directory / kernels).glob("*.o"), *host_objects()]
        command = ["g++", "-shared", *flags, *map(str, objects), "-o", str(directory / f"lib{kernels}.so")]
        subprocess.run(command, check=True)


@functools.cache
def compiled() -> Path:
    """Return the directory of the libraries."""
    return made_once("toys", lambda directory: compile_toys(directory, "-O1"), PLUGINS, Path(__file__).parent)


@functools.cache
def toys() -> Toys:
    """Return the toy kernels."""
    return Toys(compiled() / "libtoys.so")


@functools.cache
def races() -> Toys:
    """Return the toys with races, with the race detector."""
    return Toys(compiled() / "libraces.so")


@functools.cache
def clusters() -> Toys:
    """Return the toys in clusters, with the race detector, on a GPU that has clusters."""
    library = Toys(compiled() / "libclusters.so")
    library.set_device("sm_90a")
    return library


@functools.cache
def mbarriers() -> Toys:
    """Return the toys that send asynchronous stores, with the race detector, on a GPU that has clusters."""
    library = Toys(compiled() / "libmbarriers.so")
    library.set_device("sm_90a")
    return library


@functools.cache
def executions() -> Toys:
    """Return the toy whose executions are counted."""
    return Toys(compiled() / "libexecutions.so")


def aligned(shape: Sequence[int], dtype: object, fill: object = 0) -> np.ndarray:
    """Return an array that starts at a multiple of 64 bytes."""
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
