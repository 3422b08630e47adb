"""The parts of a decoder's caches that run by nodes, under a policy without kernels for them, and their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvc_trt.backends.torch.nodes.layer_inputs import ManyTokens, OneToken
from kvc_trt.backends.torch.policy_path import policy_path

if TYPE_CHECKING:
    from kvc_trt.backends.torch.decoder_options import DecoderOptions
    from kvc_trt.backends.torch.nodes.cache_operations import CacheOperations
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig

State = Mapping[str, Tensor]
"""The state tensors by name: k_cache.L, v_cache.L [B,G,C,D], bounds.L [B,G,2D,P] if the layer has pages,
slot_positions.L [B,G,C] if turns compact it, and further state of the policy's selection."""
Projections = tuple[Tensor, Tensor, Tensor]
Block = tuple[Tensor, Projections]
"""Many tokens of each row: their residual stream [T,hidden], their queries [B,S,H,D], keys and values [B,S,G,D]."""


class Projecting(Protocol):
    """The part of a decoder that the caches call."""

    config: ModelConfig
    parameters: PolicyParameters
    cache_dtype: torch.dtype
    exposed: dict[str, Tensor]

    @property
    def sinks(self) -> Mapping[str, Tensor]:
        """The sinks [H] of every layer, in the cache's type, by their names in graphs; empty if there are none."""

    @property
    def rotary_tables(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position, float32 [L,D/2]."""

    def plain_tokens(self, layer: int, hidden: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Project tokens of the residual stream before the rotary embedding to queries [B,S,H,D], keys [B,S,G,D]."""

    def plain_token(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project N normed tokens before the rotary embedding to queries [N,H,D], keys [N,G,D]."""


@dataclass(frozen=True)
class ByNodes:
    """The parts of a decoder that run by nodes."""

    prompts: CachesByNodes | None = None
    """The caches of prompts and turns; None if kernels run all of them."""
    steps: CachesByNodes | None = None
    pads: bool = False
    """True if prompts must be padded for the nodes."""


def runs_by_nodes(decoder: Projecting, options: DecoderOptions) -> ByNodes:
    """Return the parts of a decoder that run by nodes.

    Within its budget, an engine gives the twin's result bit for bit, so a twin's steps run the bodies that the engine's
    run, and its prompts are padded like the engine's.
    """
    path, twin_of = policy_path(decoder.config, decoder.parameters), options.twin_of
    engine = path if twin_of is None else policy_path(decoder.config, twin_of)
    if engine is None:
        return ByNodes()
    from kvc_trt.backends.torch.nodes.cache_operations import CacheOperations
    from kvc_trt.graph.cache_graphs import CacheGraphs

    until = (twin_of or decoder.parameters).slice_limit
    graphs = CacheGraphs(decoder.config, decoder.parameters, turns=options.turns, slice_until=until)
    operations = CacheOperations(
        graphs,
        decoder.rotary_tables,
        options,
        kernels=engine.steps,
        exposed=decoder.exposed,
        weights=decoder.sinks,
    )
    caches = CachesByNodes(decoder, operations)
    steps = not engine.plain_steps if path is not None else not engine.steps
    return ByNodes(None if path is None else caches, caches if steps else None, pads=True)


class CachesByNodes:
    """Runs a decoder's caches by nodes, and asks the decoder for values that only some nodes read."""

    def __init__(self, decoder: Projecting, operations: CacheOperations) -> None:
        self._decoder, self._operations, self._dtype = decoder, operations, decoder.cache_dtype

    def store(self, layer: int, block: Block, prompt_lengths: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the state of a layer's caches after prompts of lengths [B], and the number of entries [B] of each."""
        return self._operations.store(layer, self._many(layer, block), prompt_lengths)

    def take_turn(
        self, layer: int, block: Block, lengths: Sequence[int], positions: Tensor,
        cache_lengths: Sequence[Sequence[int]], state: State,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Attend from a turn's tokens and store them in place; return [B,H,M,D] and each cache's entries after it."""
        new, before = (torch.tensor(numbers, device=positions.device) for numbers in (lengths, cache_lengths))
        attended, after = self._operations.take_turn(layer, self._many(layer, block), new, positions, before, state)
        return attended.to(block[0].dtype), after

    def attend(
        self, layer: int, x: Tensor, made: Projections, positions: Tensor, cache_lengths: Tensor, state: State,
        count: int,
    ) -> list[Tensor]:  # fmt: skip
        """Run the attention [B,H,D] of `count` steps, one after the other; the tokens [count*B] are known.

        `x` is their normed residual stream, `cache_lengths` [caches,B] are the entries before the first step.
        """

        @cache
        def every_plain() -> list[tuple[Tensor, ...]]:
            return _by_step([part.to(self._dtype) for part in self._decoder.plain_token(layer, x)], count)

        def plain(step: int) -> tuple[Tensor, Tensor]:
            query, key = every_plain()[step]
            return query, key

        found = []
        inputs = _by_step([*(part.to(self._dtype) for part in made), positions], count)
        for step, (query, key, value, place) in enumerate(inputs):
            token = OneToken(query, key, value, partial(plain, step))
            stored = cache_lengths + step if step else cache_lengths
            found.append(self._operations.attend(layer, token, place, stored, state, step, count))
        return found

    def _many(self, layer: int, block: Block) -> ManyTokens:
        hidden, made = block

        @cache
        def plain() -> tuple[Tensor, Tensor]:
            query, keys = self._decoder.plain_tokens(layer, hidden, len(made[0]))
            return query.to(self._dtype), keys.to(self._dtype)

        queries, keys, values = (part.transpose(1, 2).to(self._dtype) for part in made)
        return ManyTokens(queries, keys, values, plain)


def _by_step(parts: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    """Divide tensors of `count` steps, one behind the other, and return those of each step."""
    return list(zip(*(part.chunk(count) for part in parts), strict=True))
