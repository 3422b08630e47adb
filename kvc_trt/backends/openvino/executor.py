"""Run an engine's prefill with OpenVINO and its decode steps with ONNX Runtime, in place over the same buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from typing_extensions import override

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.openvino.lowering import GraphConstants, Target
from kvc_trt.backends.openvino.paged_attention import AttentionHeads
from kvc_trt.backends.openvino.prefill import CompiledGraph
from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.engine.program import Program, read_graph
from kvc_trt.graph.rewrites.expose import expose
from kvc_trt.methods.base.graph_context import softmax_of

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory


class OpenVinoExecutor(OnnxRuntimeExecutor):
    """The `Executor` of one engine, or of a `Program` derived from one. Each graph is loaded when it is first needed.

    Without `keep_prefill` the prefill graph is compiled anew for each prefill, and its
    weights and temporaries need no memory while tokens are decoded. `expose` names internal values for `exposed`, as in
    `EngineSessions`.
    """

    def __init__(
        self,
        engine: EngineDirectory | Program,
        options: RunOptions = DEFAULTS,
        *,
        keep_prefill: bool = True,
        expose: Collection[str] = (),
    ) -> None:
        super().__init__(engine, options, expose=expose)
        self._keep_prefill = keep_prefill
        self._target = target_of(self.program, options)

    @property
    @override
    def cuts_prefill(self) -> bool:
        """False: a prefill cannot run in slices, because OpenVINO compiles the whole graph."""
        return False

    @cached_property
    def compiled_prefill(self) -> CompiledGraph:
        """The prefill graph; its weights are packed for OpenVINO's kernels when it first runs."""
        model = read_graph(self.program.prefill)
        if self._expose_prefill:
            model = expose(model, self._expose_prefill)
        with self.program.weight_file.steady():
            constants = GraphConstants.mapped(model.graph, self.program.weight_file)
            return CompiledGraph(model, constants, self._target)

    @override
    def _check_precision(self) -> None:
        """Do nothing: OpenVINO computes in bf16 on any processor."""

    @override
    def _load_prefill(self) -> None:
        if self._keep_prefill:
            assert self.compiled_prefill is not None

    @override
    def _run_prefill(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> None:
        self._exposed.update(self.compiled_prefill.run(inputs, outputs, self._expose_prefill))
        if not self._keep_prefill:
            del self.compiled_prefill


def target_of(program: Program, options: RunOptions) -> Target:
    """Return the properties on which the form of a program's prefill graph depends."""
    model = program.model
    plain = not softmax_of(model).code
    heads = AttentionHeads(model.num_attention_heads, model.num_key_value_heads, model.head_size, plain)
    return Target(heads, program.dtype, options.prefill_precision, options.threads)
