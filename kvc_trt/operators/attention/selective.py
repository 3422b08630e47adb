"""Shared by operators that read part of the cache: the append, the dense path of short rows, the slots read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.attention.append import Place
from kvc_trt.operators.attention.attend import GroupedQuery, attend_first, group_query, ungroup
from kvc_trt.operators.shapes import Layout, int32, one, size
from kvc_trt.operators.tensors import K_CACHE, V_CACHE, updated
from kvc_trt.operators.vectors import NEW, Tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

LAST_INDEX = np.int64(2**31 - 1)
LOWEST_RANK = np.float32(-np.inf)
"""Rank of NaN and of unused slots or pages; among equals the lower index wins, so unused ones come last."""


@dataclass(frozen=True)
class AppendedStep:
    """A step after its append: the inputs of the dense and the sparse path."""

    layout: Layout
    query: GroupedQuery
    new: Tables
    """The new entry as it is stored."""
    tables: Tables
    table_rows: Tables
    """`tables` as [B*G*C,.]: gathering rows by one index each is cheaper than by index tuples."""
    first_row: Value
    """INT64 [B,G,1]: the row of each head's slot 0 in `table_rows`."""
    lengths: Value
    """[B,1,1,1]: entries of each row, the new one included."""
    longest: Value
    """Scalar: entries of the longest row."""
    limit: Value
    """Scalar: rows up to this length attend to all their entries."""

    def rows(self, emit: Emitter, tokens: Value) -> Value:
        """Return the rows of `tokens` [B,G,T] in `table_rows`; tokens past the capacity point to the last slot."""
        capacity = _capacity(emit, self.layout)
        last = [capacity - 1] if isinstance(capacity, int) else emit.Sub(capacity, 1)
        return str(emit.Add(emit.Min(tokens, last), self.first_row))

    def gather(self, emit: Emitter, rows: Value) -> tuple[Value, Value]:
        """Gather keys and values [...,D] of `rows` [...], as they are read."""
        return self.table_rows.map(lambda part: emit.Gather(part, rows)).read(emit)

    def caches(self) -> dict[str, Value]:
        """Return the caches after the append by the names of the outputs."""
        return self.tables.named(updated(K_CACHE), updated(V_CACHE))


def append(emit: Emitter, layout: Layout) -> tuple[Place, AppendedStep]:
    """Store k_new and v_new after the `cache_lengths` entries of k_cache and v_cache."""
    place = Place(emit, "cache_lengths", layout.shape)
    new = NEW.stored_at_once(emit, layout)
    tables = place.store(new, layout)
    lengths = emit.Add(place.slots, 1)
    limit = emit.Max(emit.attribute("token_budget"), emit.attribute("dense_until"))
    query = group_query(emit, "query", layout)
    # Outside the branches, where ONNX Runtime reshapes in place.
    table_rows = tables.as_rows(emit, layout.shape.head_size)
    first_row, longest = place.first_rows(_capacity(emit, layout)), emit.ReduceMax(lengths, keepdims=0)
    return place, AppendedStep(layout, query, new, tables, table_rows, first_row, lengths, longest, limit)


def attend_all_or(
    emit: Emitter, step: AppendedStep, sparse: Callable[[Emitter], list[Value]], *, lists: int
) -> tuple[Value, Value]:
    """Attend densely with the code of KvcDenseAttention if all rows of the batch fit, otherwise as `sparse` writes.

    `sparse` returns its result and the tokens read, INT64 [B,lists,T], -1 for none. -> (output [B,H,D], tokens)."""

    def dense(branch: Emitter) -> list[Value]:
        attended = attend_first(branch, step.query, step.tables, step.lengths, step.longest)
        slots = branch.Range(0, step.longest, 1)
        every = branch.Where(branch.Less(slots, branch.Squeeze(step.lengths, [3])), slots, -1)
        return [attended, branch.Expand(every, [1, lists, 1])]

    fits = emit.LessOrEqual(step.longest, step.limit)
    attended, tokens = emit.choose(fits, dense, sparse, outputs=2)
    return ungroup(emit, attended, "query", step.layout.shape), tokens


def ascending(emit: Emitter, tokens: Value, width: Value) -> Value:
    """Sort `tokens` INT64 [B,G,T] (-1 for none) -> INT32 [B,G,width] ascending, -1 past the end.

    Written outside the branches, so that `prune` can drop it if `selected` is not used.
    """
    width = one(emit, width)
    gaps = emit.Where(emit.Less(tokens, 0), LAST_INDEX, tokens)
    listed, _ = emit.TopK(gaps, emit.Min(width, size(emit, tokens, 2)), outputs=2, axis=2, largest=0)
    missing = emit.Sub(width, size(emit, listed, 2))
    padded = emit.Pad(listed, emit.Concat([0, 0, 0, 0, 0], missing, axis=0), LAST_INDEX)
    return int32(emit, emit.Where(emit.Equal(padded, LAST_INDEX), -1, padded))


def largest_channels(emit: Emitter, query: Value) -> Value:
    """Return the channels of largest |q|, summed over the group of `query` [B,G,g,D]; INT64 [B,G,top_r], unordered."""
    sums = emit.ReduceL1(query, [2], keepdims=0)
    _, channels = emit.TopK(sums, one(emit, emit.attribute("top_r")), outputs=2, axis=2, sorted=0)
    return str(channels)


def temperature(emit: Emitter, query: Value, selected: Value, head_size: int) -> Value:
    """Return sqrt(D * share of |q| on the selected channels) per head, sqrt(D) if the share is 0; [B,G,g,1]."""
    covered = emit.ReduceL1(selected, [3])
    share = emit.Div(covered, emit.ReduceL1(query, [3]))
    share = emit.Where(emit.Greater(covered, 0.0), share, 1.0)
    return str(emit.Sqrt(emit.Mul(share, float(head_size))))


def _capacity(emit: Emitter, layout: Layout) -> int | Value:
    return size(emit, "k_cache", 2) if layout.capacity is None else layout.capacity
