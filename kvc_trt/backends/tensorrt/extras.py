"""Outputs that an engine has beyond the usual ones: values that verification looks at, each in memory of its own."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.tensorrt.device import DeviceBlock, Stream
from kvc_trt.models.dtypes import numpy_dtype

if TYPE_CHECKING:
    import tensorrt as trt

    from kvc_trt.backends.tensorrt.context import Context

DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64"}
"""From TensorRT's names."""


class Extras:
    """Buffers for these outputs in the shapes of one context, bound to it. Empty for an engine as it is built."""

    def __init__(self, engine: trt.ICudaEngine, context: Context, usual: Collection[str]) -> None:
        self._places: dict[str, tuple[DeviceBlock, tuple[int, ...], np.dtype[Any]]] = {}
        for name in (engine.get_tensor_name(index) for index in range(engine.num_io_tensors)):
            if engine.get_tensor_mode(name).name == "OUTPUT" and name not in usual:
                shape, dtype = context.shape_of(name), numpy_dtype(DTYPES[engine.get_tensor_dtype(name).name])
                self._places[name] = DeviceBlock(max(1, math.prod(shape)) * dtype.itemsize), shape, dtype
        context.bind({name: block.address for name, (block, _, _) in self._places.items()})

    def __bool__(self) -> bool:
        return bool(self._places)

    def read(self, stream: Stream) -> dict[str, NDArray[Any]]:
        """Copies of all values, waited for."""
        found = {name: np.empty(shape, dtype) for name, (_, shape, dtype) in self._places.items()}
        for name, value in found.items():
            stream.copy_out(value.ctypes.data, self._places[name][0].address, value.nbytes)
        if found:
            stream.synchronise()
        return found

    def free(self) -> None:
        """Give the buffers back."""
        for block, _, _ in self._places.values():
            block.free()
        self._places = {}
