"""Execution contexts: graphs with fixed shapes and addresses that are ready to be queued, and extra outputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.tensorrt.device import DeviceBlock, Stream
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.models.dtypes import numpy_dtype

if TYPE_CHECKING:
    import tensorrt as trt

    from kvc_trt.backends.tensorrt.module import TensorRT


class ExecutionContext:
    """An IExecutionContext that works in the caller's memory; contexts that never run together can share it."""

    def __init__(
        self, engine: trt.ICudaEngine, tensorrt: TensorRT, profile: int, memory: tuple[int, int], stream: Stream
    ) -> None:
        strategy: Any = cast("Any", tensorrt).ExecutionContextAllocationStrategy.USER_MANAGED
        context: trt.IExecutionContext | None = engine.create_execution_context(strategy)
        if context is None:
            raise UnsupportedEnvironment("TensorRT makes no execution context", hint="kvc-trt doctor")
        self._context, self._stream = context, stream
        _accepted(context.set_optimization_profile_async(profile, stream.handle), f"profile {profile}")
        context.set_device_memory(*memory)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Set the shape of inputs with open dimensions."""
        for name, shape in shapes.items():
            _accepted(self._context.set_input_shape(name, shape), f"shape {list(shape)} of {name}")

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Set device addresses of inputs and outputs."""
        for name, address in addresses.items():
            _accepted(self._context.set_tensor_address(name, address), f"address of {name}")

    def check_in_place(self, aliases: Mapping[str, str]) -> None:
        """Raise unless every output (key) has the same address as the input (value) that it updates."""
        for output, source in aliases.items():
            found, expected = self._context.get_tensor_address(output), self._context.get_tensor_address(source)
            if found != expected or not found:
                raise UnsupportedEnvironment(
                    f"{output} is not updated in place: expected address {expected:#x} of {source}, found {found:#x}"
                )

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of an output, once the inputs' shapes are set."""
        return sizes_of(self._context.get_tensor_shape(name))

    def enqueue(self) -> None:
        """Queue one run."""
        if not self._context.execute_async_v3(self._stream.handle):
            raise UnsupportedEnvironment("TensorRT does not run the engine", hint="kvc-trt verify ENGINE_DIR")


def sizes_of(dims: trt.Dims) -> tuple[int, ...]:
    """Convert TensorRT's dimensions to plain integers."""
    return tuple(int(dims[index]) for index in range(len(dims)))


def _accepted(accepted: bool, what: str) -> None:
    if not accepted:
        raise UnsupportedEnvironment(f"TensorRT does not accept {what}", hint="kvc-trt inspect ENGINE_DIR")


DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64", "INT8": "int8"
}  # fmt: skip
"""TensorRT's type names -> numpy's."""


class ExtraOutputs:
    """Buffers for extra outputs in the shapes of one context, bound to it. Empty for a normal engine."""

    def __init__(self, engine: trt.ICudaEngine, context: ExecutionContext, usual: Collection[str]) -> None:
        self._places: dict[str, tuple[DeviceBlock, tuple[int, ...], np.dtype[Any]]] = {}
        for name in (engine.get_tensor_name(index) for index in range(engine.num_io_tensors)):
            if engine.get_tensor_mode(name).name == "OUTPUT" and name not in usual:
                shape, dtype = context.shape_of(name), numpy_dtype(DTYPES[engine.get_tensor_dtype(name).name])
                self._places[name] = DeviceBlock(max(1, math.prod(shape)) * dtype.itemsize), shape, dtype
        context.bind({name: block.address for name, (block, _, _) in self._places.items()})

    def __bool__(self) -> bool:
        return bool(self._places)

    def read(self, stream: Stream) -> dict[str, NDArray[Any]]:
        """Return copies of all values after waiting for the stream."""
        found = {name: np.empty(shape, dtype) for name, (_, shape, dtype) in self._places.items()}
        for name, value in found.items():
            stream.copy_out(value.ctypes.data, self._places[name][0].address, value.nbytes)
        if found:
            stream.synchronise()
        return found

    def free(self) -> None:
        """Free the buffers."""
        for block, _, _ in self._places.values():
            block.free()
        self._places = {}
