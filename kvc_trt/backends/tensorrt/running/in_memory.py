"""Build engines in memory for one process: dense twins, graphs with exposed values, single operators."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.tensorrt.building.profiles import decode_profiles, prefill_profiles
from kvc_trt.backends.tensorrt.device import DeviceBlock, Stream
from kvc_trt.backends.tensorrt.lowering import updated_in_place
from kvc_trt.backends.tensorrt.running.context import DTYPES, ExecutionContext
from kvc_trt.engine.program import read_graph, split_by_graph
from kvc_trt.graph.layers import ELEMENT_TYPES
from kvc_trt.graph.rewrites.expose import expose as exposed
from kvc_trt.models.dtypes import numpy_dtype

if TYPE_CHECKING:
    from onnx import ModelProto

    from kvc_trt.backends.tensorrt.running.loading import LoadedEngine, Toolkit
    from kvc_trt.engine.program import Program


def build_program(toolkit: Toolkit, program: Program, rows: int, expose: Collection[str] = ()) -> LoadedEngine:
    """Build and load prefill and decode for up to `rows` rows, with the internal values `expose` as extra outputs.

    The result takes no turns: a turn shows all that verification looks at in the state."""
    profiles = prefill_profiles(program.parameters.max_input_len, rows), decode_profiles(rows)
    names = split_by_graph(expose, program.prefill, program.decode)
    graphs = [read_graph(graph) for graph in (program.prefill, program.decode)]
    element = ELEMENT_TYPES[program.dtype]
    with program.weight_file.steady():
        prefill, decode = (
            toolkit.build(typed(exposed(graph, wanted), element), program.weight_file, ranges)
            for graph, wanted, ranges in zip(graphs, names, profiles, strict=True)
        )
    return toolkit.load({"prefill": prefill, "decode": decode}, program.state)


def typed(model: ModelProto, element: int) -> ModelProto:
    """Return `model` with a type for every output: NVIDIA's parser infers none.

    Exposed values that are not lists of indices or lengths have the activations' type `element`.
    """
    from onnx import TensorProto

    integers = {
        **dict.fromkeys(("cache_lengths", "joined_lengths"), TensorProto.INT64),
        **dict.fromkeys(("indices", "selected", "slot_positions", "slot_positions_out"), TensorProto.INT32),
    }
    for output in model.graph.output:
        tensor = output.type.tensor_type
        if tensor.elem_type == TensorProto.UNDEFINED:
            tensor.elem_type = integers.get(output.name.partition(".")[0], element)
    return model


Array = NDArray[Any]


def run_once(toolkit: Toolkit, model: ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs by name; an output that is updated in place is read from its input's buffer."""
    engine = toolkit.deserialise(toolkit.build(model, None, ()), model.graph.name)
    aliases, stream = updated_in_place(model), Stream()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    outputs = [name for name in names if engine.get_tensor_mode(name).name == "OUTPUT"]
    memory = DeviceBlock(max(1, engine.device_memory_size_v2))
    blocks = {name: DeviceBlock(max(1, value.nbytes)) for name, value in inputs.items()}
    try:
        context = ExecutionContext(engine, toolkit.tensorrt, 0, (memory.address, memory.size), stream)
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
