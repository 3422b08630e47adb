"""Verify an engine on OpenVINO: prefill and its operators run there, decode steps on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvc_trt.backends.harness import Array, EngineOperator
from kvc_trt.backends.onnxruntime.harness import OnnxRuntimeHarness
from kvc_trt.backends.openvino.executor import OpenVinoExecutor, target_of
from kvc_trt.backends.openvino.lowering import GraphConstants, Target
from kvc_trt.backends.openvino.prefill import CompiledGraph, release
from kvc_trt.backends.single_operator import SingleOperator, single_operators
from kvc_trt.engine.program import Program, engine_program, read_graph
from kvc_trt.graph.state import cache_sites

if TYPE_CHECKING:
    from onnx import ModelProto


class OpenVinoOperator:
    """One operator of the prefill graph, compiled by OpenVINO."""

    def __init__(self, single: SingleOperator, target: Target) -> None:
        self.name, self.nodes, self.cache = single.name, single.nodes, single.cache
        self.attributes = single.attributes
        self._single, self._target = single, target

    def run(self, **inputs: Array) -> list[Array]:
        """Return the outputs in the operator's order; quantised matrices are constants, as in the graph."""
        given = {name: np.array(inputs[name], order="C") for name in self._single.inputs}
        constants = GraphConstants({name: given.pop(name) for name in ("packed", "scales") if name in given})
        model = _with_shapes(self._single.model, given)
        compiled = CompiledGraph(model, constants, self._target)
        names = [output.name for output in model.graph.output]
        found = compiled.run(given, {}, names)
        return [found[name] for name in names]


def _with_shapes(model: ModelProto, arrays: Mapping[str, Array]) -> ModelProto:
    """Return a copy whose inputs have the shapes of these arrays: OpenVINO compiles no input of unknown rank."""
    from onnx import ModelProto, helper

    shaped = ModelProto()
    shaped.CopyFrom(model)
    for value in shaped.graph.input:
        if value.name in arrays:
            element = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, element, arrays[value.name].shape))
    return shaped


class OpenVinoHarness(OnnxRuntimeHarness):
    """The engine's graphs; operators are cut out of them."""

    @override
    def _executor(self, program: Program, expose: Collection[str] = ()) -> OpenVinoExecutor:
        return OpenVinoExecutor(program, self._options, expose=expose)

    @override
    def operators(self) -> list[EngineOperator]:
        """Return the operators of the graphs' nodes, each on the library that runs its graph."""
        engine = self._engine
        target = target_of(engine_program(engine), self._options)
        sites, dtype = cache_sites(engine.model, engine.parameters), engine.model.dtype
        prefill = single_operators(read_graph(engine.prefill_graph), dtype, sites)
        others = [graph for graph in (engine.decode_graph, engine.extend_graph) if graph is not None]
        rest = [one for graph in others for one in single_operators(read_graph(graph), dtype, sites)]
        lowered = [OpenVinoOperator(one, target) for one in prefill if one.name in target.lowered]
        return [*lowered, *(one for one in prefill if one.name not in target.lowered), *rest]

    @override
    def describe(self) -> dict[str, str]:
        """Return both libraries; ONNX Runtime's native operators, if any, are those of decode."""
        described = super().describe()
        return {**described, "backend": f"openvino {release()}, {described['backend']}"}
