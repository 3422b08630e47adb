"""A program whose engines are built now, in memory, and gone with the process: twins and graphs to look into."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from kvc_trt.backends.tensorrt.profiles import decode_profiles, prefill_profiles

if TYPE_CHECKING:
    from onnx import ModelProto

    from kvc_trt.backends.tensorrt.loading import Bench, LoadedEngine
    from kvc_trt.engine.program import Program


def build_program(bench: Bench, program: Program, rows: int, expose: Collection[str] = ()) -> LoadedEngine:
    """Both graphs built and loaded for up to `rows` rows, with the inner values `expose` as further outputs."""
    from kvc_trt.engine.program import read_graph, split_by_graph
    from kvc_trt.graph.expose import expose as exposed
    from kvc_trt.graph.layers import ELEMENT_TYPES

    profiles = prefill_profiles(program.parameters.max_input_len, rows), decode_profiles(rows)
    names = split_by_graph(expose, program.prefill, program.decode)
    graphs = [read_graph(graph) for graph in (program.prefill, program.decode)]
    element = ELEMENT_TYPES[program.state[0].dtype]
    prefill, decode = (
        bench.build(typed(exposed(graph, wanted), {}, element), program.weights_path, ranges)
        for graph, wanted, ranges in zip(graphs, names, profiles, strict=True)
    )
    return bench.load(prefill, decode, program.state)


def typed(model: ModelProto, declared: Mapping[str, str], element: int) -> ModelProto:
    """`model`, every output of it that says no type given one: NVIDIA's parser infers none.

    `declared` maps an output's name to the one that its operator gives it, where they differ; what is no list of
    indices or lengths has the type of the activations, `element`.
    """
    from onnx import TensorProto

    integers = {"cache_lengths": TensorProto.INT64, "indices": TensorProto.INT32, "selected": TensorProto.INT32}
    for output in model.graph.output:
        tensor = output.type.tensor_type
        if tensor.elem_type == TensorProto.UNDEFINED:
            name = declared.get(output.name, output.name).partition(".")[0]
            tensor.elem_type = integers.get(name, element)
    return model
