"""One graph, built for the shapes of its inputs, run once: how verification runs an operator alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.tensorrt.context import Context
from kvc_trt.backends.tensorrt.device import DeviceBlock, Stream
from kvc_trt.backends.tensorrt.extras import DTYPES
from kvc_trt.backends.tensorrt.lowering import engine_aliases
from kvc_trt.models.dtypes import numpy_dtype

if TYPE_CHECKING:
    from onnx import ModelProto

    from kvc_trt.backends.tensorrt.loading import Bench

Array = NDArray[Any]


def run_once(bench: Bench, model: ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name; an output that the engine updates in place is read from its input's buffer."""
    engine = bench.deserialise(bench.build(model, None, ()), model.graph.name)
    aliases, stream = engine_aliases(engine), Stream()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    outputs = [name for name in names if engine.get_tensor_mode(name).name == "OUTPUT"]
    memory = DeviceBlock(max(1, engine.device_memory_size_v2))
    blocks = {name: DeviceBlock(max(1, value.nbytes)) for name, value in inputs.items()}
    try:
        context = Context(engine, bench.tensorrt, 0, (memory.address, memory.size), stream)
        arrays = {
            name: np.empty(context.shape_of(name), numpy_dtype(DTYPES[engine.get_tensor_dtype(name).name]))
            for name in outputs
        }
        for name, array in arrays.items():
            if name not in aliases:
                blocks[name] = DeviceBlock(max(1, math.prod(array.shape)) * array.itemsize)
        places = {name: blocks[aliases.get(name, name)].address for name in names if aliases.get(name, name) in blocks}
        context.bind(places)
        contiguous = {name: np.ascontiguousarray(value) for name, value in inputs.items()}
        for name, value in contiguous.items():
            stream.copy_in(places[name], value.ctypes.data, value.nbytes)
        context.enqueue()
        for name, array in arrays.items():
            stream.copy_out(array.ctypes.data, places[name], array.nbytes)
        stream.synchronise()
    finally:
        for block in (memory, *blocks.values()):
            block.free()
        stream.free()
    return arrays
