"""Verify an engine in PyTorch whose policy has no kernels for some part: its operators are those of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

from kvc_trt.backends.harness import EngineOperator, StoredBlock, Watched
from kvc_trt.backends.single_operator import alike_nodes
from kvc_trt.backends.stored_blocks import stored_blocks
from kvc_trt.backends.torch.executor import Decoding, TorchExecutor, kernel_device
from kvc_trt.backends.torch.harness import TorchHarness, TorchOperator
from kvc_trt.backends.torch.model.prompt_attention import prefill_attention, sliding_attention
from kvc_trt.backends.torch.model.shaped_attention import shaped_attention
from kvc_trt.backends.torch.nodes.program import Operators
from kvc_trt.backends.torch.policy_path import PolicyPath, policy_path
from kvc_trt.engine.program import twin_program
from kvc_trt.graph.cache_graphs import CacheGraphs
from kvc_trt.graph.cache_nodes import layout_of
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.base.graph_context import of_token
from kvc_trt.methods.base.registry import operators
from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.attention.sliding_attention import SLIDING_ATTENTION
from kvc_trt.operators.compaction.compact import BY_WINDOW
from kvc_trt.reference.softmax import Softmax

if TYPE_CHECKING:
    from onnx import NodeProto

    from kvc_trt.runtime.executor import Executor


class NodeHarness(TorchHarness):
    """The engine through `TorchExecutor`, with the operators that its nodes call."""

    @override
    def open_twin(self) -> Executor:
        """Open the dense twin so that its steps run the same operations as the engine's within the budget."""
        twin, engine = twin_program(self._engine), self._engine.parameters
        return TorchExecutor(twin, self._options, weights=self._weights, decoding=Decoding(twin_of=engine))

    @override
    def operators(self) -> list[EngineOperator]:
        """Return the operators that the nodes of prompts, steps and turns call, and attention over the prompt."""
        layers, device = self._engine.model.cached_layers, kernel_device()
        layout = layout_of(self._engine.model, self._engine.parameters, self._engine.model.dtype)
        many = Operators(layout, device)
        steps = many if self._path.steps else Operators(layout, device, kernels=False)
        turns = self._graphs.turn if self._engine.extend_graph is not None else None
        found: list[EngineOperator] = self._over_prompt()
        for write, compiled in ((self._graphs.prompt, many), (self._graphs.step, steps), (turns, many)):
            nodes = [node for layer in layers for node in write(layer)] if write is not None else []
            for alike, cache in alike_nodes(nodes, self._graphs.sites):
                body = _by_name(alike[0], compiled)
                found.append(TorchOperator(alike[0].op_type, len(alike), body, device, cache))
        return [*found, *self._linear_layers()]

    def _over_prompt(self) -> list[EngineOperator]:
        """Return attention over the prompt: of layers that see everything, and of each window of sliding ones."""
        device, windows = kernel_device(), dict[int, list[CacheSite]]()
        for site in self._graphs.sites:
            windows.setdefault(site.parameters.capacity if site.parameters.slides else 0, []).append(site)
        whole = len({site.layer for site in windows.pop(0, [])})
        found: list[EngineOperator] = [
            TorchOperator(SLIDING_ATTENTION.name, len(sites), self._attention(window), device, sites[0].cache)
            for window, sites in windows.items()
        ]
        if whole:
            found.insert(0, TorchOperator(PREFILL_ATTENTION.name, whole, self._attention(None), device))
        return found

    def _attention(self, window: int | None) -> Callable[..., tuple[Tensor, ...]]:
        """Return attention over a prompt by the names of the operator's inputs."""
        cap = self._engine.model.description.attention_softcap

        def attend(q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None = None) -> tuple[Tensor, ...]:
            if cap is not None or sink_logits is not None:
                return (shaped_attention(q, k, v, softmax=Softmax(cap, sink_logits), window=window),)
            return (prefill_attention(q, k, v) if window is None else sliding_attention(q, k, v, window=window),)

        return attend

    @override
    def compactions(self) -> list[Watched]:
        """Return the nodes that write kept positions; only lists by the last queries are judged by inputs."""
        return [
            Watched(site.cache, tuple(node.input[:3]) if node.op_type in BY_WINDOW else (), (f"indices.{site.name}",))
            for site, node in self._writers(self._graphs.prompt, "indices")
        ]

    @override
    def selections(self) -> list[Watched]:
        if self._path.plain_steps:
            return super().selections()
        return [
            Watched(site.cache, (node.input[0],), (node.output[0], node.output[-1]))
            for site, node in self._writers(self._graphs.step, "selected")
        ]

    @override
    def stored_blocks(self, graph: str) -> list[list[StoredBlock]]:
        tokens, writers = self._tokens_of(graph), {"prefill": self._graphs.prompt, "extend": self._graphs.turn}
        write = writers.get(graph, self._graphs.step)
        nodes = [node for layer in self._engine.model.cached_layers for node in write(layer)]
        found = stored_blocks(nodes, self._graphs.sites, "k_cache" if graph == "prefill" else "k_cache_out")
        return [[_of_token(block, token, tokens) for block in found] for token in range(tokens)]

    @override
    def describe(self) -> dict[str, str]:
        """Return the description of `TorchHarness`, and the parts that run without kernels."""
        return {**super().describe(), "without kernels": str(self._path)}

    def _writers(self, write: Callable[[int], Sequence[NodeProto]], kind: str) -> list[tuple[CacheSite, NodeProto]]:
        """Return each cache for which a node writes a list of that kind, and the node."""
        by_output: Mapping[str, NodeProto] = {
            name: node for layer in self._engine.model.cached_layers for node in write(layer) for name in node.output
        }
        names = ((site, f"{kind}.{site.name}") for site in self._graphs.sites)
        return [(site, by_output[name]) for site, name in names if name in by_output]

    @cached_property
    def _graphs(self) -> CacheGraphs:
        turns = self._engine.extend_graph is not None
        return CacheGraphs(self._engine.model, self._engine.parameters, turns=turns)

    @property
    def _path(self) -> PolicyPath:
        path = policy_path(self._engine.model, self._engine.parameters)
        assert path is not None, "kernels do all of it"
        return path


def _by_name(node: NodeProto, compiled: Operators) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that runs a node's operator alone, with inputs by their names, and returns all outputs."""
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    names = [tensor.name for tensor in operators()[node.op_type].for_numbers(numbers).inputs]
    called = compiled.call(node, node.output)
    return lambda **inputs: tuple(called([inputs[name] for name in names]))


def _of_token(block: StoredBlock, token: int, tokens: int) -> StoredBlock:
    """Return the names of a step's keys and values as a pass over several tokens shows them."""
    keys, values = (of_token(name, token, tokens) for name in (block.keys, block.values))
    return replace(block, keys=keys, values=values)
