"""Runners of an engine's graphs for Polygraphy's comparator, with every tensor as an output.

    onnxruntime  the graph of the engine directory
    lowered      the same graph as it is rewritten for TensorRT, its functions inlined, by ONNX Runtime
    torch, ... an executor of ours: the graph's outputs, and each compression operator's inputs and choice

Polygraphy's own TensorRT runner gives every output a buffer of its own, which a cache that is updated in place must not
have, and its loader allows an engine to bring executable code. A TensorRT engine is run by our executor instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, inliner
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata

from kvc_trt.backends.onnxruntime.loading import LoadOptions, load_graph
from kvc_trt.backends.onnxruntime.shared_weights import SharedWeights
from kvc_trt.backends.tensorrt.lowering.operators import FIRST_FOR_GRAPHS, TensorRtInstallation
from kvc_trt.backends.tensorrt.lowering.passes import EXECUTABLE_PASSES
from kvc_trt.engine.program import read_graph
from kvc_trt.errors import InputError
from kvc_trt.verify.rungs.tensor_differences import tensor_names

if TYPE_CHECKING:
    from kvc_trt.backends.harness import Harness
    from kvc_trt.engine import EngineDirectory

Array = NDArray[Any]


def graph_runner(name: str, model: ModelProto, engine: EngineDirectory, threads: int | None) -> OnnxrtRunner:
    """ONNX Runtime on a graph of the engine's weights, with every tensor as an output."""
    returned = {output.name for output in model.graph.output}
    inner = [tensor for tensor in tensor_names(model) if tensor not in returned]
    weights = SharedWeights(engine.weight_file)
    options = LoadOptions(threads, prepack=False, dtype=engine.model.dtype, weights=weights)
    return OnnxrtRunner(lambda: load_graph(lambda: model, options, inner), name=name)


def rewritten(model: ModelProto) -> tuple[str, ModelProto]:
    """The part that ONNX Runtime executes of the graph after TensorRT's passes, with functions inlined; and its name.

    Where TensorRT reads no such graph (quantised weights, a policy without kernels) the functions
    are inlined alone.
    """
    copy, name = ModelProto(), "lowered"
    copy.CopyFrom(model)
    try:
        for step in EXECUTABLE_PASSES:
            step(copy, TensorRtInstallation(FIRST_FOR_GRAPHS, frozenset()))
    except InputError:
        copy, name = model, "inlined"
    return name, inliner.inline_local_functions(copy)


class ExecutorRunner(BaseRunner):  # type: ignore[misc]  # Polygraphy has no types
    """An executor of an engine as Polygraphy's runner of one graph; `exposed` maps its values' names to the graph's."""

    def __init__(
        self, name: str, graph: str, engine: EngineDirectory, harness: Harness, exposed: Mapping[str, str]
    ) -> None:
        super().__init__(name=name)
        self._graph, self._engine, self._harness, self._exposed = graph, engine, harness, exposed

    def activate_impl(self) -> None:
        """Open the executor."""
        self._executor: Any = self._harness.open(expose=sorted(self._exposed))

    def deactivate_impl(self) -> None:
        """Release the executor."""
        del self._executor

    def get_input_metadata_impl(self) -> TensorMetadata:
        """The graph's inputs."""
        found = TensorMetadata()
        if self._graph == "prefill":
            found.add("input_ids", np.int64, (None, None))
            return found.add("prompt_lengths", np.int64, (None,))
        for name, shape in (("token", (None,)), ("positions", (None,)), ("cache_lengths", (None, None))):
            found.add(name, np.int64, shape)
        for tensor in self._engine.step_state:
            found.add(tensor.name, np.dtype(tensor.dtype), (None, *tensor.shape))
        return found

    def infer_impl(self, feed_dict: Mapping[str, Array]) -> dict[str, Array]:
        """Run the graph's part of the executor on one row; the state comes from the feed, not from a run before."""
        executor = self._executor
        executor.allocate(1)
        if self._graph == "prefill":
            prefilled = executor.prefill(feed_dict["input_ids"], feed_dict["prompt_lengths"])
            executor.insert(prefilled, 0, 0)
            found = {"logits": prefilled.logits, "cache_lengths": prefilled.cache_lengths}
            names = {tensor.name: tensor.name for tensor in self._engine.state}
        else:
            state = self._engine.step_state
            executor.fill_rows({tensor.name: feed_dict[tensor.name][0] for tensor in state})
            step = (feed_dict[name] for name in ("token", "positions", "cache_lengths"))
            found = {"logits": executor.decode(*step)}
            names = {tensor.name: tensor.aliased_output for tensor in state}
        buffers = executor.buffers
        found |= {name: np.array(buffers[own]) for own, name in names.items()}
        found |= {name: np.array(executor.exposed(own)) for own, name in self._exposed.items()}
        self.inference_time = 0.0
        return found


def engine_graph(engine: EngineDirectory, graph: str) -> ModelProto:
    """The prefill or decode graph of an engine directory, without its weights."""
    return read_graph(engine.prefill_graph if graph == "prefill" else engine.decode_graph)
