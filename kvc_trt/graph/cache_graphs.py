"""The nodes of one layer's caches without the rest of the layer, for a backend that computes the rest itself.

Inputs are values of these names, L the layer: `query_rows.L` [B,S,H*D], `queries.L` [B,H,S,D], `keys.L`, `values.L`
[B,G,S,D], `plain_queries.L` [B,S,H,D] and `plain_keys.L` (before the rotary embedding) of a prompt or a turn;
`query.L` [B,H,D], `key.L`, `value.L` [B,G,D], `plain_query.L`, `plain_key.L` of a step; `prompt_lengths`, or `lengths`
of a turn [B]; `positions` [B]; `cache_lengths` [caches,B]; the tables `cosine` and `sine` of the rotary embedding
[positions,D/2]; `model.layers.L.self_attn.sinks` [H] where attention has sinks; and every state tensor. Outputs have
the names of an engine's graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvc_trt.graph.cache_nodes import (
    ProjectedValues,
    attend_token,
    numbers_of_prompts,
    numbers_of_turns,
    prompt_window,
    store_prompt,
    take_turn,
    turn_window,
)
from kvc_trt.graph.state import CacheSite, cache_sites
from kvc_trt.methods.base.graph_context import Angles, DecodeBatch, PromptBatch, TurnBatch
from kvc_trt.methods.base.registry import operators
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.schema import SOFTMAX
from kvc_trt.operators.shapes import size

if TYPE_CHECKING:
    from onnx import NodeProto

    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.operators.schema import Operator

ROTARY_TABLES = "cosine", "sine"
UNREAD = ""
NO_ANGLES: Angles = {}
"""Stand for values that a whole graph shares between layers and no cache reads: the grid of tokens, and its angles."""


class CacheGraphs:
    """Writes the nodes of the caches of an engine's layers; no two layers have a value of the same name.

    With `turns`, prompts also store the state that a turn needs. `slice_until` is the length up to which dense layers
    attend to a slice of the cache; None: the policy's own.
    """

    def __init__(
        self, config: ModelConfig, parameters: PolicyParameters, *, turns: bool = False, slice_until: int | None = None
    ) -> None:
        self.config, self.parameters, self._turns = config, parameters, turns
        self._slice_until = parameters.slice_limit if slice_until is None else slice_until

    @cached_property
    def sites(self) -> tuple[CacheSite, ...]:
        """Every cache of the engine."""
        return cache_sites(self.config, self.parameters)

    def of_layer(self, layer: int) -> list[CacheSite]:
        """Return the caches of one layer."""
        return [site for site in self.sites if site.layer == layer]

    def prompt(self, layer: int) -> Sequence[NodeProto]:
        """Write the tensors stored of a prompt: the state, `lengths.C` [B] of each cache C, `indices.C` if it
        evicts."""

        def write(emit: Emitter) -> None:
            lengths = "prompt_lengths"
            window = prompt_window(emit, self.parameters, lengths)
            numbers = numbers_of_prompts(emit, self.parameters, lengths)
            batch = PromptBatch(lengths, UNREAD, NO_ANGLES, window, _rotary_tables, numbers)
            store_prompt(emit, self.config, batch, _projected(layer), self.of_layer(layer), turns=self._turns)

        return _written(layer, write)

    def step(self, layer: int) -> Sequence[NodeProto]:
        """Write a decode step: `attended.L` [B,H,D] and the updated state."""

        def write(emit: Emitter) -> None:
            batch = DecodeBatch(NO_ANGLES, "cache_lengths", "positions", self._slice_until, _rotary_tables)
            made = f"query.{layer}", f"key.{layer}", f"value.{layer}", lambda: _plain(layer)
            sites = self.of_layer(layer)
            lengths = [emit.Gather(batch.cache_lengths, site.cache) for site in sites]
            name = f"model.layers.{layer}"
            found = attend_token(emit, self.config, batch, made, name, sites, lengths)
            emit.Identity(found, outputs=[f"attended.{layer}"])

        return _written(layer, write)

    def turn(self, layer: int) -> Sequence[NodeProto]:
        """Write a turn: `attended.L` [B,H,M,D], the updated state, and `lengths.C` [B] of each cache C after it."""

        def write(emit: Emitter) -> None:
            lengths, block = "lengths", size(emit, f"queries.{layer}", 2)
            window, counting = turn_window(emit, self.parameters, lengths, block)
            numbers = numbers_of_turns(emit, self.parameters, "positions", lengths)
            batch = TurnBatch(lengths, UNREAD, NO_ANGLES, window, _rotary_tables, numbers, "positions", counting)
            projected, sites = _projected(layer), self.of_layer(layer)
            found = take_turn(emit, self.config, batch, projected, sites, "cache_lengths")
            emit.Identity(found, outputs=[f"attended.{layer}"])

        return _written(layer, write)

    def step_operator(self, layer: int) -> Operator | None:
        """Return the operator that is all of a layer's decode step; None if there are several, or other nodes."""
        nodes = [node for node in self.step(layer) if node.op_type != "Constant"]
        called = called_operators(nodes)
        # The others are the cache's row of `cache_lengths`, and the name of the result.
        return called[0] if len(nodes) == 3 and len(called) == 1 else None


def called_operators(nodes: Sequence[NodeProto]) -> list[Operator]:
    """Return the operators of ours that nodes call, one for each call."""
    known = operators()
    calls = [(node.op_type, {one.name: one.i for one in node.attribute}) for node in nodes if node.domain == KVC_DOMAIN]
    return [known[name].with_softmax(numbers.get(SOFTMAX.name, 0)) for name, numbers in calls]


def _written(layer: int, write: Callable[[Emitter], None]) -> Sequence[NodeProto]:
    emit = Emitter()
    with emit.scope(f"layers.{layer}"):
        write(emit)
    return emit.nodes


def _projected(layer: int) -> ProjectedValues:
    return ProjectedValues(
        query_rows=f"query_rows.{layer}",
        queries=f"queries.{layer}",
        keys=f"keys.{layer}",
        values=f"values.{layer}",
        plain_keys=lambda: f"plain_keys.{layer}",
        plain_queries=lambda: f"plain_queries.{layer}",
    )


def _plain(layer: int) -> tuple[Value, Value]:
    return f"plain_query.{layer}", f"plain_key.{layer}"


def _rotary_tables() -> tuple[Value, Value]:
    return ROTARY_TABLES
