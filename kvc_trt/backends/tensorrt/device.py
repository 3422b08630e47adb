"""The CUDA runtime calls needed to run an engine, through cuda-bindings, which is imported on first use.

`call` turns the status of every call into the user's error. Addresses are plain integers.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import KvcError, UnsupportedEnvironment
from kvc_trt.sizes import readable_size

_OUT_OF_MEMORY, _INSUFFICIENT_DRIVER, _NO_DEVICE = 2, 35, 100


class DeviceOutOfMemory(UnsupportedEnvironment):
    """The GPU refused an allocation."""


@cache
def runtime() -> Any:
    """Return cuda.bindings.runtime; UnsupportedEnvironment if the package is missing or does not load."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except Exception as error:  # a broken installation raises whatever its loader raises
        raise UnsupportedEnvironment(
            f"package cuda-bindings: expected an installed one, found none that loads ({' '.join(str(error).split())})",
            hint="pip install 'kvc-trt[tensorrt]'",
        ) from error


def call(function: Callable[..., tuple[Any, ...]], *arguments: Any, doing: str) -> tuple[Any, ...]:
    """Call a CUDA runtime function and return its results after the status; raise `failure` if it failed."""
    status, *values = function(*arguments)
    if int(status) != 0:
        raise failure(int(status), status.name, doing)
    return tuple(values)


def failure(status: int, name: str, doing: str) -> KvcError:
    """Return the user's error for a CUDA runtime status; `doing` names the operation that failed."""
    message = f"CUDA, {doing}: {name} ({status})"
    if status == _OUT_OF_MEMORY:
        return DeviceOutOfMemory(message, hint="take fewer rows at once; `kvc-trt plan --backend tensorrt` says why")
    if status == _INSUFFICIENT_DRIVER:
        return UnsupportedEnvironment(message, hint="update NVIDIA's driver; kvc-trt doctor shows what is needed")
    if status == _NO_DEVICE:
        return UnsupportedEnvironment(message, hint="nvidia-smi lists the GPUs; is CUDA_VISIBLE_DEVICES empty?")
    return UnsupportedEnvironment(message, hint="kvc-trt doctor; after an illegal address only a new process helps")


def free_memory() -> tuple[int, int]:
    """Return (free, total) bytes of the current device."""
    free, total = call(runtime().cudaMemGetInfo, doing="asking for free memory")
    return int(free), int(total)


class DeviceBlock:
    """One allocation on the device, aligned to at least 256 bytes as everything from CUDA's allocator."""

    def __init__(self, size: int) -> None:
        self.size = size
        (address,) = call(runtime().cudaMalloc, size, doing=f"allocating {readable_size(size)}")
        self.address = int(address)

    def free(self) -> None:
        """Free the block; nothing may be running on it."""
        if self.address:
            address, self.address = self.address, 0
            call(runtime().cudaFree, address, doing="freeing device memory")


class PinnedArray:
    """Host memory that the device reads and writes directly, as a NumPy array."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        (address,) = call(runtime().cudaMallocHost, size, doing=f"allocating {size} bytes of pinned memory")
        self.address, self.size = int(address), size
        memory = (ctypes.c_char * size).from_address(self.address)
        self.array: NDArray[Any] = np.frombuffer(memory, dtype).reshape(shape)

    def free(self) -> None:
        """Free the memory; views of `array` are then invalid."""
        if self.address:
            address, self.address = self.address, 0
            call(runtime().cudaFreeHost, address, doing="freeing pinned memory")


class Graph:
    """A CUDA graph: work of a stream, recorded once and replayed with one call."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable

    def launch(self, stream: Stream) -> None:
        """Queue the whole graph."""
        call(runtime().cudaGraphLaunch, self._executable, stream.native, doing="launching a CUDA graph")

    def free(self) -> None:
        """Free the graph; it must not be running."""
        if self._executable is not None:
            executable, self._executable = self._executable, None
            call(runtime().cudaGraphExecDestroy, executable, doing="freeing a CUDA graph")


class Stream:
    """A CUDA stream that waits for no other stream."""

    def __init__(self) -> None:
        flags = runtime().cudaStreamNonBlocking
        (self.native,) = call(runtime().cudaStreamCreateWithFlags, flags, doing="making a stream")
        self.handle = int(self.native)

    def synchronise(self) -> None:
        """Wait until all queued work is done; kernel errors are raised here."""
        call(runtime().cudaStreamSynchronize, self.native, doing="running on the device")

    def free(self) -> None:
        """Free the stream, which must not be in use."""
        call(runtime().cudaStreamDestroy, self.native, doing="freeing a stream")

    def copy_in(self, address: int, source: int, size: int) -> None:
        """Queue a copy from the host; the source must not change until the next synchronisation."""
        self._copy(address, source, size, runtime().cudaMemcpyKind.cudaMemcpyHostToDevice)

    def copy_out(self, destination: int, address: int, size: int) -> None:
        """Queue a copy to the host."""
        self._copy(destination, address, size, runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def copy(self, destination: int, address: int, size: int) -> None:
        """Queue a copy on the device; the ranges must not overlap."""
        self._copy(destination, address, size, runtime().cudaMemcpyKind.cudaMemcpyDeviceToDevice)

    def zero(self, address: int, size: int) -> None:
        """Queue filling a range with zeros."""
        call(runtime().cudaMemsetAsync, address, 0, size, self.native, doing="clearing device memory")

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` queues, without running it."""
        mode = runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        call(runtime().cudaStreamBeginCapture, self.native, mode, doing="beginning a CUDA graph")
        try:
            work()
        finally:  # a stream left in capture mode is unusable, so end it; its own error matters less
            status, graph = runtime().cudaStreamEndCapture(self.native)
        if int(status) != 0:
            raise failure(int(status), status.name, "recording a CUDA graph")
        try:
            (executable,) = call(runtime().cudaGraphInstantiate, graph, 0, doing="making a CUDA graph executable")
        finally:
            call(runtime().cudaGraphDestroy, graph, doing="freeing a recording")
        return Graph(executable)

    def _copy(self, destination: int, source: int, size: int, kind: Any) -> None:
        call(runtime().cudaMemcpyAsync, destination, source, size, kind, self.native, doing="copying")
