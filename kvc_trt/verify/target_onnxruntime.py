"""An engine on ONNX Runtime: its two graphs, and every operator as the graphs contain it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.graph import KVC_DOMAIN
from kvc_trt.verify.single_op import single_ops
from kvc_trt.verify.target import Operator, Watched

if TYPE_CHECKING:
    from onnx import NodeProto

    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
    from kvc_trt.engine import Engine


class OnnxRuntimeTarget:
    """The engine's own graphs; operators are cut out of them."""

    def __init__(self, engine: Engine, threads: int | None) -> None:
        self._engine, self._threads = engine, threads

    def open(self, expose: Collection[str] = ()) -> OnnxRuntimeExecutor:
        """The graphs; exposed values become outputs of an in-memory copy."""
        from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

        return OnnxRuntimeExecutor(self._engine, threads=self._threads, expose=expose)

    def open_twin(self) -> OnnxRuntimeExecutor:
        """Graphs derived from config.json and the same weight file, in memory."""
        from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
        from kvc_trt.backends.onnxruntime.program import twin_program

        return OnnxRuntimeExecutor(twin_program(self._engine), threads=self._threads)

    def operators(self) -> list[Operator]:
        """The graphs' nodes, with the graphs' function bodies."""
        dtype = self._engine.state[0].dtype
        return [
            op for graph in (self._engine.prefill_path, self._engine.decode_path) for op in single_ops(graph, dtype)
        ]

    def compactions(self) -> list[Watched]:
        """The nodes of the prefill graph."""
        nodes = _nodes(self._engine.prefill_path, "KvcCompact")
        return [Watched(_layer(n, "indices."), tuple(n.input[:3]), (n.output[-1],)) for n in nodes]

    def selections(self) -> list[Watched]:
        """The nodes of the decode graph."""
        nodes = _nodes(self._engine.decode_path, "KvcHybridAttention")
        return [Watched(_layer(n, "selected."), (n.input[0],), (n.output[0], n.output[-1])) for n in nodes]

    def describe(self) -> dict[str, str]:
        """ONNX Runtime executes the operators' ONNX bodies."""
        import onnxruntime

        return {"backend": f"onnxruntime {onnxruntime.__version__}"}


def _nodes(graph: Path, op_type: str) -> list[NodeProto]:
    import onnx

    nodes = onnx.load(str(graph), load_external_data=False).graph.node
    return [node for node in nodes if node.domain == KVC_DOMAIN and node.op_type == op_type]


def _layer(node: NodeProto, prefix: str) -> int:
    return int(node.output[-1].removeprefix(prefix))
