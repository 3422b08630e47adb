"""The caches of a layer by the nodes of the engine's graphs, for policies that have no kernels for some part of it.

A node of an operator that has a kernel calls it; all others run as PyTorch operations (`program.py`). The host
waits for lengths and conditions, so nothing here can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kvc_trt.backends.torch.nodes.layer_inputs import ManyTokens, OneToken
from kvc_trt.backends.torch.nodes.program import NodeProgram, Operators, Scope, Tensors
from kvc_trt.graph.cache_graphs import ROTARY_TABLES, CacheGraphs
from kvc_trt.graph.cache_nodes import layout_of
from kvc_trt.graph.rewrites.prune import read_names
from kvc_trt.graph.state import StateTensor, state_tensors
from kvc_trt.methods.base.graph_context import of_any_token, of_token

if TYPE_CHECKING:
    from onnx import NodeProto

    from kvc_trt.backends.torch.decoder_options import DecoderOptions

Given = Mapping[str, Callable[[], Tensor]]
"""Name of a value that nodes may read -> the function that makes it, which is called only if it is read."""


class CacheOperations:
    """Runs the caches of an engine's layers. `rotary` are cosine and sine of every position, float32 [L,D/2].

    Without `kernels`, steps run the bodies of all operators. `weights` are those of the model that nodes read. Values
    in `options.expose` are copied to `exposed` by every run; those of the steps of a pass have the names that a draft
    graph gives them (`of_token`).
    """

    def __init__(
        self, graphs: CacheGraphs, rotary: tuple[Tensor, Tensor], options: DecoderOptions, *, kernels: bool,
        exposed: dict[str, Tensor], weights: Tensors,
    ) -> None:  # fmt: skip
        self._graphs, self._rotary, self._weights = graphs, rotary, weights
        self._expose, self._exposed = frozenset(options.expose), exposed
        name = str(options.cache_dtype).removeprefix("torch.")
        layout, device = layout_of(graphs.config, graphs.parameters, name), rotary[0].device
        self.operators = Operators(layout, device)
        """The operators of prompts and turns."""
        self.step_operators = self.operators if kernels else Operators(layout, device, kernels=False)
        self._state = state_tensors(graphs.config, graphs.parameters, name, turns=options.turns)
        self._programs: dict[tuple[str, int], NodeProgram] = {}

    def store(self, layer: int, tokens: ManyTokens, prompt_lengths: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the state of a layer's caches after prompts of lengths [B], and the number of entries [B] of each."""
        names, lengths = [one.name for one in self._of_layer(layer)], self._lengths(layer)
        program = self._program("prompt", layer, self._graphs.prompt, self.operators, [*names, *lengths])
        found = self._run(program, {**tokens.given(layer), "prompt_lengths": lambda: prompt_lengths})
        return dict(zip(names, found, strict=False)), found[len(names) : len(names) + len(lengths)]

    def attend(
        self, layer: int, token: OneToken, positions: Tensor, cache_lengths: Tensor, state: Tensors, step: int = 0,
        steps: int = 1,
    ) -> Tensor:  # fmt: skip
        """Append one token per row at `positions` [B] to the caches of a layer, in place, and attend: [B,H,D].

        `cache_lengths` [caches,B] are the entries before. The token is that of one of the `steps` of a pass.
        """
        tensors = [one for one in self._of_layer(layer) if one.in_step]
        outputs = [f"attended.{layer}", *(one.aliased_output for one in tensors)]
        program = self._program("step", layer, self._graphs.step, self.step_operators, outputs)
        given = {**token.given(layer), "positions": lambda: positions, "cache_lengths": lambda: cache_lengths}
        found = self._run(program, given, state, step, steps)
        _write_back(state, tensors, found[1:])
        return found[0]

    def take_turn(
        self, layer: int, tokens: ManyTokens, lengths: Tensor, positions: Tensor, cache_lengths: Tensor, state: Tensors
    ) -> tuple[Tensor, list[Tensor]]:
        """Attend from a turn of `lengths` [B] tokens per row and store it in place.

        `positions` [B] are those of the first tokens, `cache_lengths` [caches,B] the entries before. Returns [B,H,M,D]
        and the entries [B] of each cache after it.
        """
        tensors, after = self._of_layer(layer), self._lengths(layer)
        outputs = [f"attended.{layer}", *(one.aliased_output for one in tensors), *after]
        program = self._program("turn", layer, self._graphs.turn, self.operators, outputs)
        given = {
            **tokens.given(layer), "lengths": lambda: lengths, "positions": lambda: positions,
            "cache_lengths": lambda: cache_lengths,
        }  # fmt: skip
        found = self._run(program, given, state)
        _write_back(state, tensors, found[1:])
        first = 1 + len(tensors)
        return found[0], found[first : first + len(after)]

    def _program(
        self, kind: str, layer: int, write: Callable[[int], Sequence[NodeProto]], operators: Operators,
        outputs: Sequence[str],
    ) -> NodeProgram:  # fmt: skip
        if (kind, layer) not in self._programs:
            nodes = write(layer)
            seen = read_names(nodes).union(*(node.output for node in nodes))
            exposed = sorted(seen.intersection(map(of_any_token, self._expose)))
            self._programs[kind, layer] = NodeProgram(nodes, [*outputs, *exposed], operators, exposed=exposed)
        return self._programs[kind, layer]

    def _run(
        self, program: NodeProgram, given: Given, state: Tensors | None = None, step: int = 0, steps: int = 1
    ) -> list[Tensor]:
        tables = dict(zip(ROTARY_TABLES, self._rotary, strict=True))
        known = {**tables, **self._weights, **(state or {})}
        values = {name: known[name] if name in known else given[name]() for name in program.reads}
        found = program.run(Scope(values))
        for name, value in zip(reversed(program.exposed), reversed(found), strict=False):
            if (shown := of_token(name, step, steps)) in self._expose:
                self._exposed[shown] = value.clone()
        return found

    def _of_layer(self, layer: int) -> list[StateTensor]:
        return [one for one in self._state if one.layer == layer]

    def _lengths(self, layer: int) -> list[str]:
        return [f"lengths.{site.name}" for site in self._graphs.of_layer(layer)]


def _write_back(state: Tensors, tensors: Sequence[StateTensor], found: Sequence[Tensor]) -> None:
    """Copy the results that were not computed in place into the state."""
    for tensor, value in zip(tensors, found, strict=False):
        target = state[tensor.name]
        if value.data_ptr() != target.data_ptr():
            target.copy_(value)
