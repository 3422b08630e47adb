"""CUDA and TensorRT without a GPU, for the executor: device memory is the host's, engines are graphs in ONNX Runtime.

Queued work runs only when somebody waits for it, and recorded work runs once per launch of its graph: an executor that
reads too early, or leaves a part of a step out of its recording, answers with old values.
"""
# ruff: noqa: N802, N815 - the names are CUDA's

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvc_trt.backends.tensorrt.lowering import expected_aliases
from tests.graph.small_models import open_session

TYPES = {
    "tensor(float)": ("FLOAT", np.float32),
    "tensor(float16)": ("HALF", np.float16),
    "tensor(int64)": ("INT64", np.int64),
    "tensor(int32)": ("INT32", np.int32),
    "tensor(int8)": ("INT8", np.int8),
}


class Status(IntEnum):
    cudaSuccess = 0


class FakeCuda:
    """Stands in for cuda.bindings.runtime: the calls of device.py, all on one stream."""

    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(
        cudaMemcpyHostToDevice="in", cudaMemcpyDeviceToHost="out", cudaMemcpyDeviceToDevice="on"
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self) -> None:
        self.log: list[Any] = []
        """The host's calls since the last clear: ("out", bytes) for a copy to it, "wait", "record", "launch"."""
        self._memory: dict[int, Any] = {}
        self._queued: list[Callable[[], None]] = []
        self._recording: list[Callable[[], None]] | None = None

    @property
    def allocations(self) -> int:
        """Blocks that were not given back."""
        return len(self._memory)

    def cudaMemGetInfo(self):
        return Status.cudaSuccess, 1 << 40, 1 << 40

    def cudaMalloc(self, size):
        block = ctypes.create_string_buffer(size + 512)
        address = -(-ctypes.addressof(block) // 512) * 512
        self._memory[address] = block
        return Status.cudaSuccess, address

    def cudaFree(self, address):
        assert not self._queued, "freed while something may run on it"
        del self._memory[address]
        return (Status.cudaSuccess,)

    cudaMallocHost, cudaFreeHost = cudaMalloc, cudaFree

    def cudaStreamCreateWithFlags(self, flags):
        return Status.cudaSuccess, 1

    def cudaStreamDestroy(self, stream):
        return (Status.cudaSuccess,)

    def cudaStreamSynchronize(self, stream):
        assert self._recording is None, "waited while recording"
        self.log.append("wait")
        queued, self._queued = self._queued, []
        for work in queued:
            work()
        return (Status.cudaSuccess,)

    def cudaMemcpyAsync(self, destination, source, size, kind, stream):
        def copy() -> None:
            if kind == "out":
                self.log.append(("out", size))
            ctypes.memmove(destination, source, size)

        return self.queue(copy)

    def cudaMemsetAsync(self, address, value, size, stream):
        return self.queue(lambda: ctypes.memset(address, value, size) and None)

    def cudaStreamBeginCapture(self, stream, mode):
        assert not self._queued
        self._recording = []
        return (Status.cudaSuccess,)

    def cudaStreamEndCapture(self, stream):
        self.log.append("record")
        recorded, self._recording = self._recording, None
        return Status.cudaSuccess, recorded

    def cudaGraphInstantiate(self, graph, flags):
        return Status.cudaSuccess, list(graph)

    def cudaGraphDestroy(self, graph):
        return (Status.cudaSuccess,)

    cudaGraphExecDestroy = cudaGraphDestroy

    def cudaGraphLaunch(self, executable, stream):
        self.log.append("launch")
        self._queued += executable
        return (Status.cudaSuccess,)

    def queue(self, work: Callable[[], None]) -> tuple[Status]:
        """Work of the stream, for later or for the recording."""
        (self._queued if self._recording is None else self._recording).append(work)
        return (Status.cudaSuccess,)


class FakeEngine:
    """An ICudaEngine with one profile; its contexts run `model`."""

    num_optimization_profiles = 1

    cuda: FakeCuda
    """The fake CUDA whose memory and stream its contexts use."""

    def __init__(self, model: Any, directory: Any, ranges: Sequence[tuple[int, ...]]) -> None:
        self.session = open_session(model, directory)
        self._ranges = ranges
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self._aliases = expected_aliases(model)

    @property
    def num_io_tensors(self):
        return len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, index):
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name):
        return SimpleNamespace(name="INPUT" if name in self.inputs else "OUTPUT")

    def get_tensor_dtype(self, name):
        return SimpleNamespace(name=TYPES[{**self.inputs, **self.outputs}[name].type][0])

    def get_tensor_shape(self, name):
        return [size if isinstance(size, int) else -1 for size in {**self.inputs, **self.outputs}[name].shape]

    def get_tensor_location(self, name):
        return SimpleNamespace(name="DEVICE")

    def get_tensor_profile_shape(self, name, index):
        return self._ranges

    def get_device_memory_size_for_profile_v2(self, index):
        return 1000

    def get_aliased_input_tensor(self, name):
        return self._aliases.get(name, "")

    def create_execution_context(self, strategy):
        return FakeContext(self)


class FakeContext:
    """An IExecutionContext; its outputs' shapes are known once it ran."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile, stream):
        return profile == 0

    def set_device_memory(self, address, size):
        assert address % 256 == 0
        assert size == 1000

    def set_input_shape(self, name, shape):
        self._shapes[name] = shape
        return name in self._engine.inputs

    def set_tensor_address(self, name, address):
        self._addresses[name] = address
        return address % 256 == 0 and name in {**self._engine.inputs, **self._engine.outputs}

    def get_tensor_address(self, name):
        return self._addresses[name]

    def execute_async_v3(self, stream):
        engine, shapes, addresses = self._engine, dict(self._shapes), dict(self._addresses)

        def run() -> None:
            feeds = {name: at(addresses[name], shapes[name], value).copy() for name, value in engine.inputs.items()}
            found = engine.session.run(list(engine.outputs), feeds)
            for (name, value), answer in zip(engine.outputs.items(), found, strict=True):
                at(addresses[name], answer.shape, value)[...] = answer

        engine.cuda.queue(run)
        return True


def at(address: int, shape: Sequence[int], value: Any) -> np.ndarray:
    """Return the array at an address."""
    dtype = np.dtype(TYPES[value.type][1])
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)
