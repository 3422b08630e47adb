"""What a decode step hands to a cache: the new token's query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvc_trt.graph.state import cache_heads, cache_sites
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.shapes import HeadShape


@dataclass(frozen=True)
class Step:
    """What every layer of the decode graph needs to know about the batch."""

    angles: tuple[Value, Value]
    """Cosine and sine of the positions, [B,1,D/2]"""
    cache_lengths: Value
    """[caches,B]"""
    positions: Value
    """[B]"""
    slice_until: int
    """Dense layers attend to a slice of at most so many entries, as a sparse layer does where a row fits."""


@dataclass(frozen=True)
class StepLayer:
    """One layer's attention inputs for one token per row, or those of one group of its KV heads."""

    batch: Step
    query: Value
    """[B,H,D]"""
    key: Value
    """[B,G,D]"""
    value: Value
    plain: Callable[[], tuple[Value, Value]]
    """Query and key before the rotary embedding."""
    lengths: Value
    """[B]: entries of the cache before this step."""
    attended: str
    """Name of the result."""

    def of(self, emit: Emitter, kv_heads: tuple[int, ...] | None, group_size: int) -> StepLayer:
        """The part of some KV heads; None: all of it."""
        if kv_heads is None:
            return self
        heads = [kv * group_size + head for kv in kv_heads for head in range(group_size)]
        plain = self.plain

        def plain_part() -> tuple[Value, Value]:
            query, key = plain()
            return emit.Gather(query, heads, axis=1), emit.Gather(key, list(kv_heads), axis=1)

        key, value = (emit.Gather(part, list(kv_heads), axis=1) for part in (self.key, self.value))
        return replace(self, query=emit.Gather(self.query, heads, axis=1), key=key, value=value, plain=plain_part)


def head_shape(config: ModelConfig, parameters: PolicyParameters) -> HeadShape:
    """Attention shape of every cache of an engine."""
    heads = {cache_heads(config, site) for site in cache_sites(config, parameters)}
    if heads == {config.num_key_value_heads}:
        return HeadShape(config.num_attention_heads, config.num_key_value_heads, config.head_size)
    if heads == {config.num_attention_heads}:
        return HeadShape(config.num_attention_heads, config.num_attention_heads, config.head_size)
    return HeadShape(None, None, config.head_size)
