"""Verify an engine on ONNX Runtime: its graphs, and every operator in the form that the graphs have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from kvc_trt.backends.harness import EngineOperator, Harness, StoredBlock, Watched
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.native import native_operators
from kvc_trt.backends.single_operator import single_operators
from kvc_trt.backends.stored_blocks import stored_blocks
from kvc_trt.engine.program import Program, engine_program, read_graph, twin_program
from kvc_trt.graph.rewrites.native import native_in
from kvc_trt.graph.state import CacheSite, cache_sites
from kvc_trt.methods.base.graph_context import of_token
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.compaction.compact import BY_WINDOW
from kvc_trt.operators.experts import OF_EXPERTS

if TYPE_CHECKING:
    from onnx import NodeProto

    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.files.held import HeldFile


class OnnxRuntimeHarness(Harness):
    """The engine's graphs; operators are cut out of them."""

    def __init__(self, engine: EngineDirectory, options: RunOptions) -> None:
        self._engine, self._options = engine, options

    @property
    @override
    def truncates(self) -> bool:
        """Return False: CPU sums round to nearest."""
        return False

    @override
    def open(self, expose: Collection[str] = ()) -> OnnxRuntimeExecutor:
        """Open the graphs; exposed values become outputs of an in-memory copy."""
        return self._executor(engine_program(self._engine), expose)

    @override
    def open_twin(self) -> OnnxRuntimeExecutor:
        """Open graphs that are built in memory from config.json over the same weight file."""
        return self._executor(replace(twin_program(self._engine), by_bodies=self._attends_by_bodies))

    @override
    def open_beside_twin(self) -> OnnxRuntimeExecutor | None:
        """Open the engine with operators' bodies, like its twin, if a body computes attention in some of its steps."""
        if not self._attends_by_bodies:
            return None
        return self._executor(replace(engine_program(self._engine), by_bodies=True))

    def _executor(self, program: Program, expose: Collection[str] = ()) -> OnnxRuntimeExecutor:
        return OnnxRuntimeExecutor(program, self._options, expose=expose)

    @cached_property
    def _attends_by_bodies(self) -> bool:
        """True if a body computes attention in some steps, while the twin's steps could use native operators.

        A native operator sums in another order than a body, so the two would not agree bit for bit.
        """
        native = native_operators(self._engine.model.dtype)
        if native is None:
            return False
        nodes = read_graph(self._engine.decode_graph).graph.node
        computed = native_in(nodes, native.operators)
        return any(node.domain == KVC_DOMAIN and node.op_type not in computed for node in nodes)

    @override
    def operators(self) -> list[EngineOperator]:
        """Return the operators of the graphs' nodes, with the graphs' function bodies."""
        engine = self._engine
        sites, dtype = cache_sites(engine.model, engine.parameters), engine.model.dtype
        graphs = (engine.prefill_graph, engine.decode_graph, engine.extend_graph)
        return [op for graph in graphs if graph is not None for op in single_operators(read_graph(graph), dtype, sites)]

    @override
    def compactions(self) -> list[Watched]:
        """Return the prefill nodes that write kept positions; only lists by the last queries are judged by inputs."""
        found = []
        for site, node in self._writers(self._engine.prefill_graph, "indices"):
            inputs = tuple(node.input[:3]) if node.op_type in BY_WINDOW else ()
            found.append(Watched(site.cache, inputs, (f"indices.{site.name}",)))
        return found

    @override
    def selections(self) -> list[Watched]:
        return self._choosing(self._engine.decode_graph)

    @override
    def draft_selections(self) -> list[list[Watched]]:
        """Return the nodes of the draft graph that choose tokens, for each token of a pass."""
        graph, tokens = self._engine.draft_graph, 1 + (self._engine.build.draft_tokens or 0)
        if graph is None:
            return []
        return [self._choosing(graph, token, tokens) for token in range(tokens)]

    @override
    def stored_blocks(self, graph: str) -> list[list[StoredBlock]]:
        engine, tokens = self._engine, 1 + (self._engine.build.draft_tokens or 0) if graph == "draft" else 1
        file: HeldFile | None = getattr(engine, f"{graph}_graph")
        if file is None or engine.parameters.cache_format.keys is None:
            return []
        nodes, sites = read_graph(file).graph.node, cache_sites(engine.model, engine.parameters)
        cache = "k_cache" if graph == "prefill" else "k_cache_out"
        return [stored_blocks(nodes, sites, cache, token, tokens) for token in range(tokens)]

    @override
    def routers(self, graph: str) -> dict[int, str]:
        file: HeldFile | None = getattr(self._engine, f"{graph}_graph")
        if file is None:
            return {}
        model, nodes = self._engine.model, read_graph(file).graph.node
        layers = [layer for layer in range(model.num_hidden_layers) if model.experts(layer) is not None]
        return dict(zip(layers, (node.input[0] for node in nodes if node.op_type in OF_EXPERTS), strict=False))

    def _choosing(self, graph: HeldFile, token: int = 0, tokens: int = 1) -> list[Watched]:
        writers = self._writers(graph, "selected", token, tokens)
        return [Watched(s.cache, (node.input[0],), (node.output[0], node.output[-1])) for s, node in writers]

    def _writers(
        self, graph: HeldFile, kind: str, token: int = 0, tokens: int = 1
    ) -> list[tuple[CacheSite, NodeProto]]:
        """Return each cache for which a node of the graph writes a list of that kind, and the node.

        Of a graph that feeds several `tokens` per row, the node of one of them.
        """
        nodes = read_graph(graph).graph.node
        by_output = {name: node for node in nodes for name in node.output}
        sites = cache_sites(self._engine.model, self._engine.parameters)
        names = ((site, of_token(f"{kind}.{site.name}", token, tokens)) for site in sites)
        return [(site, by_output[name]) for site, name in names if name in by_output]

    @override
    def describe(self) -> dict[str, str]:
        """Return the backend, and the library of native operators where the operators' ONNX bodies do not run."""
        import onnxruntime

        native = native_operators(self._engine.model.dtype)
        found = {"backend": f"onnxruntime {onnxruntime.__version__}"}
        if native is None:
            return found
        return {**found, "kernels": native.describe()}
