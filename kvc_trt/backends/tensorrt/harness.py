"""Verify an engine on TensorRT. Further plans are built in memory from its graphs and weights: the graphs with internal
values as outputs, the dense twin, and every operator alone.

Each is a separate build with its own weights on the GPU, so verification takes minutes and up to three times the memory
of a run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from kvc_trt.backends.harness import Array, EngineOperator, Harness, Watched
from kvc_trt.backends.onnxruntime.harness import OnnxRuntimeHarness
from kvc_trt.backends.single_operator import single_operators
from kvc_trt.backends.tensorrt.running.executor import TensorRtExecutor
from kvc_trt.backends.tensorrt.running.in_memory import build_program, run_once
from kvc_trt.backends.tensorrt.running.loading import open_toolkit
from kvc_trt.engine.program import engine_program, read_graph, twin_program
from kvc_trt.errors import InputError

if TYPE_CHECKING:
    from onnx import ModelProto

    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.backends.single_operator import SingleOperator
    from kvc_trt.backends.tensorrt.running.loading import Toolkit
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.engine.program import Program

FEWEST_ROWS = 8
"""The number of rows that the rungs run at once."""


@dataclass(frozen=True)
class TensorRtOperator:
    """One operator of the engine, built and run for the exact shapes of each case."""

    single: SingleOperator
    toolkit: Toolkit

    @property
    def name(self) -> str:
        """The name of the operator, such as KvcCompact."""
        return self.single.name

    @property
    def nodes(self) -> int:
        """The number of the engine's nodes with this operator and constants."""
        return self.single.nodes

    @property
    def cache(self) -> int | None:
        """The number of one cache that it serves."""
        return self.single.cache

    def run(self, **inputs: Array) -> list[Array]:
        """Return the outputs in the operator's order; caches are copied to the GPU first."""
        wanted = {name: inputs[name] for name in self.single.inputs}
        model = for_shapes(self.single.model, {name: value.shape for name, value in wanted.items()})
        found = run_once(self.toolkit, model, wanted)
        return [found[value.name] for value in self.single.model.graph.output]


class TensorRtHarness(Harness):
    """The engine through `TensorRtExecutor`."""

    def __init__(self, engine: EngineDirectory, options: RunOptions) -> None:
        check_rows(engine.build.max_batch_size, str(engine.path))
        self._engine = engine
        self._graphs = OnnxRuntimeHarness(engine, options)
        """The harness of the engine's graphs, which contain the operators."""

    @property
    @override
    def truncates(self) -> bool:
        """Return whether the engine's caches are of 16 bits."""
        return self._engine.model.dtype != "float32"

    @override
    def open(self, expose: Collection[str] = ()) -> TensorRtExecutor:
        """Open the engine's plans, or with `expose` new plans that have these values as outputs."""
        if not expose:
            return TensorRtExecutor(self._engine)
        return self._built(engine_program(self._engine), expose)

    @override
    def open_twin(self) -> TensorRtExecutor:
        """Build plans in memory from config.json and the same weight file."""
        return self._built(twin_program(self._engine), ())

    @override
    def open_beside_twin(self) -> None:
        """Return None: engine and twin run the same plugins."""

    @override
    def operators(self) -> list[EngineOperator]:
        dtype, engine = self._engine.model.dtype, self._engine
        graphs = [one for one in (engine.prefill_graph, engine.decode_graph, engine.extend_graph) if one is not None]
        return [
            TensorRtOperator(op, self._toolkit) for graph in graphs for op in single_operators(read_graph(graph), dtype)
        ]

    @override
    def compactions(self) -> list[Watched]:
        return self._graphs.compactions()

    @override
    def selections(self) -> list[Watched]:
        return self._graphs.selections()

    @override
    def draft_selections(self) -> list[list[Watched]]:
        """Return nothing: these engines check no drafts."""
        return []

    @override
    def describe(self) -> dict[str, str]:
        """Return TensorRT's version, the GPU, and the plugin library."""
        toolkit = self._toolkit
        library = f"{toolkit.library.path} ({toolkit.library.kind}, sha256 {toolkit.library.sha256[:16]})"
        return {"backend": f"tensorrt {toolkit.tensorrt.__version__} on {toolkit.gpu}", "kernels": library}

    @cached_property
    def _toolkit(self) -> Toolkit:
        """TensorRT, GPU and plugins, checked against the engine's manifest."""
        return open_toolkit(self._engine)

    def _built(self, program: Program, expose: Collection[str]) -> TensorRtExecutor:
        loaded = build_program(self._toolkit, program, self._engine.build.max_batch_size, expose)
        return TensorRtExecutor(program, loaded=loaded)


def check_rows(rows: int, what: str) -> None:
    """Raise InputError if an engine would have too few rows to be verified; to be called before it is built."""
    if rows < FEWEST_ROWS:
        raise InputError(
            f"{what} takes {rows} rows at once; verification needs {FEWEST_ROWS}",
            hint=f"build it with --max-batch-size {FEWEST_ROWS}, or with --no-verify and verify it by --backend torch",
        )


def for_shapes(model: ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> ModelProto:
    """Return a copy of an operator's graph whose inputs have exactly these shapes."""
    from onnx import ModelProto, helper

    copy = ModelProto()
    copy.CopyFrom(model)
    types = [value.type.tensor_type.elem_type for value in copy.graph.input]
    for value, element in zip(copy.graph.input, types, strict=True):
        value.CopyFrom(helper.make_tensor_value_info(value.name, element, shapes[value.name]))
    return copy
