"""What prefill does with a prompt's keys and values: keep them all, or compact them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from onnx import FunctionProto

from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import LOWEST, PAGED, CacheSite
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators import compact, compact_ranked
from kvc_trt.operators import function as functions
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.shapes import count_to, size

KEPT = ("k_kept", "v_kept", "kept", "ranks")
"""What a layer holds until its budget is known."""


@dataclass(frozen=True)
class Prompt:
    """What every layer of the prefill graph needs to know about the batch."""

    lengths: Value
    """[B]"""
    grid: Value
    """INT64 [2]: batch, sequence."""
    angles: tuple[Value, Value]
    """Cosine and sine of the positions, [B,S,D/2]"""
    window: Value
    """INT64 [B,W,1]: positions of each row's last W queries; rows before its start point at 0."""


@dataclass(frozen=True)
class PromptLayer:
    """One layer's attention inputs for a whole prompt, or those of one group of its KV heads."""

    batch: Prompt
    query_rows: Value
    """[B,S,H*D]"""
    queries: Value
    """[B,H,S,D]"""
    keys: Value
    """[B,G,S,D]"""
    values: Value
    plain_keys: Callable[[], Value]
    """`keys` before the rotary embedding."""
    heads: tuple[int, ...] | None = None
    """Query heads of the group; None where it is the whole layer."""

    def of(self, emit: Emitter, kv_heads: tuple[int, ...] | None, group_size: int) -> PromptLayer:
        """The part of some KV heads; None: all of it."""
        if kv_heads is None:
            return self
        heads = tuple(kv * group_size + head for kv in kv_heads for head in range(group_size))
        keys, values = (emit.Gather(part, list(kv_heads), axis=1) for part in (self.keys, self.values))
        queries = emit.Gather(self.queries, list(heads), axis=1)
        plain_keys = self.plain_keys
        return replace(
            self,
            queries=queries,
            keys=keys,
            values=values,
            heads=heads,
            plain_keys=lambda: str(emit.Gather(plain_keys(), list(kv_heads), axis=1)),
        )

    def window(self, emit: Emitter, head_size: int) -> Value:
        """The last W queries of each row, [B,H,W,D]."""
        last = by_head(emit, emit.GatherND(self.query_rows, self.batch.window, batch_dims=1), head_size)
        return last if self.heads is None else str(emit.Gather(last, list(self.heads), axis=1))


def by_head(emit: Emitter, x: Value, head_size: int) -> Value:
    """[B,S,heads*D] -> [B,heads,S,D]"""
    return str(emit.Transpose(emit.Reshape(x, [0, 0, -1, head_size]), perm=[0, 2, 1, 3]))


def store_whole(layers: Layers, prompt: PromptLayer, site: CacheSite) -> None:
    """The whole prompt in the cache; nothing is selected, padding is zero."""
    emit, capacity, lengths = layers.emit, site.parameters.capacity, prompt.batch.lengths
    count = emit.Min(size(emit, prompt.keys, 2), [capacity])
    stored = emit.Less(emit.Unsqueeze(count_to(emit, count), [1]), emit.Reshape(lengths, [-1, 1, 1, 1]))
    # Of every axis: ONNX Runtime moves a transpose through Pad as if there were no list of axes.
    missing = emit.Concat([0, 0, 0, 0, 0, 0], emit.Sub([capacity], count), [0], axis=0)
    for rows, name in ((prompt.keys, "k_cache"), (prompt.values, "v_cache")):
        zero = emit.CastLike(np.float32(0), rows)
        kept = emit.Where(stored, emit.Slice(rows, [0], count, [2]), zero)
        emit.Pad(kept, missing, zero, outputs=[f"{name}.{site.name}"])
    emit.Identity(lengths, outputs=[f"lengths.{site.name}"])


def store_compacted(layers: Layers, prompt: PromptLayer, site: CacheSite, bounds: str) -> None:
    """What KvcCompact keeps; page bounds go to the value of that name.

    Where budgets are set for each prompt, twice the budget and its ranks: `trim` then writes the cache.
    """
    emit, rule = layers.emit, site.parameters
    inputs = [prompt.window(emit, layers.config.head_size), prompt.keys, prompt.values, prompt.batch.lengths]
    if rule.squeeze_share is not None:
        kept = [f"{name}.{site.name}" for name in KEPT]
        functions.call(emit, compact_ranked.NAME, inputs, kept, prompt_budget=rule.most_kept)
        return
    names = (f"k_cache.{site.name}", f"v_cache.{site.name}", bounds, f"lengths.{site.name}", f"indices.{site.name}")
    functions.call(
        emit, compact.NAME, inputs, names, prompt_budget=rule.prompt_budget, capacity=rule.capacity,
        pool_kernel=rule.pool_kernel, page_size=rule.page_size,
    )  # fmt: skip


def trim(emit: Emitter, site: CacheSite, budgets: Value, lengths: Value) -> None:
    """The cache of a layer whose budget for each row is known now, `budgets` [B]."""
    rule = site.parameters
    bounds = "bounds" if rule.decode_selection in PAGED else "unused_bounds"
    names = [f"{name}.{site.name}" for name in ("k_cache", "v_cache", bounds, "lengths", "indices")]
    inputs = [*(f"{name}.{site.name}" for name in KEPT), budgets, lengths]
    functions.call(emit, compact_ranked.TRIM, inputs, names, capacity=rule.capacity, page_size=rule.page_size)


def compact_body(layers: Layers, parameters: PolicyParameters) -> Mapping[str, Callable[[], FunctionProto]]:
    """KvcCompact, or the two that do its work where budgets are set for each prompt, for one engine's cache type."""
    dtype = layers.weights.dtype
    lowest = np.array(LOWEST[dtype], numpy_dtype(dtype))
    return {
        compact.NAME: lambda: compact.compact(parameters.pool_kernel, lowest),
        compact_ranked.NAME: lambda: compact_ranked.compact_ranked(parameters.pool_kernel),
        compact_ranked.TRIM: lambda: compact_ranked.trim(lowest),
    }
