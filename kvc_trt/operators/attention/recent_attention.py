"""KvcRecentAttention, KvcRankedRecentAttention: overwrite the oldest entry that is not a sink, attend to all entries.

Source: StreamingLLM (arXiv 2309.17453), section 3; exact rule in docs/policies/. The slots after the sinks are a ring:
an entry stays in its slot until it is overwritten, so once the ring has wrapped, slots are not in text order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.append import Place
from kvc_trt.operators.attention.attend import attend_first, attend_slots, group_query, ungroup
from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.schema import FLOAT, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import Layout, float32
from kvc_trt.operators.tensors import CACHE_LENGTHS, CAPACITY, K_CACHE, OUTPUT, STEP, V_CACHE, updated
from kvc_trt.operators.vectors import NEW, Tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

TABLES = (Tensor("cosine", FLOAT, ("R", "D/2")), Tensor("sine", FLOAT, ("R", "D/2")))
"""Tables of the rotary embedding, one row per position."""
SINKS = Attribute("sinks", 0, MAX_TOKENS, "first tokens, which are never overwritten", at_most="capacity")


def _write_recent(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcRecentAttention.

    `cache_lengths` counts all tokens ever stored. While every row fits, this is the code of KvcDenseAttention on the
    same slice.
    """
    shape = layout.shape
    ring = _append(emit, layout)
    query = group_query(emit, "query", shape)

    def sliced(branch: Emitter) -> list[Value]:
        return [attend_first(branch, query, ring.tables, ring.stored, ring.longest)]

    def in_place(branch: Emitter) -> list[Value]:
        return [attend_slots(branch, query, *ring.tables.read(branch), ring.stored)]

    attended = emit.choose(ring.fits, sliced, in_place, outputs=1)
    return {"output": ungroup(emit, attended, "query", shape), **ring.tables.named(updated(K_CACHE), updated(V_CACHE))}


def _write_ranked(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcRankedRecentAttention; queries and keys are unrotated.

    Every step rotates the keys by their rank among the cache's entries: the sinks first, then the oldest to the newest.
    """
    shape = layout.shape
    ring = _append(emit, layout)
    newest = emit.Min(emit.Reshape("cache_lengths", [-1, 1]), emit.Sub(emit.attribute("capacity"), 1))
    turned = _rotated(emit, emit.Unsqueeze("query", [2]), newest)
    query = group_query(emit, emit.Squeeze(turned, [2]), shape)

    def sliced(branch: Emitter) -> list[Value]:
        keys, values = ring.tables.first(branch, ring.longest).read(branch)
        ranks = branch.Expand(branch.Range(0, ring.longest, 1), branch.Shape(newest))
        return [attend_slots(branch, query, _rotated(branch, keys, ranks), values, ring.stored)]

    def in_place(branch: Emitter) -> list[Value]:
        keys, values = ring.tables.read(branch)
        return [attend_slots(branch, query, _rotated(branch, keys, _ranks(branch, ring)), values, ring.stored)]

    attended = emit.choose(ring.fits, sliced, in_place, outputs=1)
    return {"output": ungroup(emit, attended, "query", shape), **ring.tables.named(updated(K_CACHE), updated(V_CACHE))}


@dataclass(frozen=True)
class _Ring:
    """The cache after the append."""

    tables: Tables
    stored: Value
    """INT64 [B,1,1,1]: tokens ever stored, the new one included; more than the capacity once the ring has wrapped."""
    newest: Value
    """INT64 [B,1,1,1]: slot of the new token."""
    length: Value
    """Scalar: number of slots after the sinks."""
    longest: Value
    """Scalar: the largest of `stored`."""
    fits: Value
    """BOOL scalar: no row has lost a token."""


def _append(emit: Emitter, layout: Layout) -> _Ring:
    capacity, sinks = emit.attribute("capacity"), emit.attribute("sinks")
    before, length = emit.Reshape("cache_lengths", [-1, 1, 1, 1]), emit.Sub(capacity, sinks)
    turning = emit.Add(emit.Mod(emit.Sub(before, sinks), length), sinks)
    newest = emit.Where(emit.Less(before, capacity), before, turning)
    place = Place(emit, "cache_lengths", layout.shape, newest)
    tables = place.store(NEW.stored_at_once(emit, layout), layout)
    stored = emit.Add(before, 1)
    longest = emit.ReduceMax(stored, keepdims=0)
    return _Ring(tables, stored, newest, length, longest, emit.LessOrEqual(longest, capacity))


def _ranks(emit: Emitter, ring: _Ring) -> Value:
    """Return the rank of the entry in each slot, INT64 [B,C]; undefined for empty slots."""
    capacity, sinks = emit.attribute("capacity"), emit.attribute("sinks")
    slots = emit.Range(0, capacity, 1)
    stored, newest = (emit.Squeeze(value, [2, 3]) for value in (ring.stored, ring.newest))
    age = emit.Mod(emit.Sub(newest, slots), ring.length)
    by_age = emit.Sub(emit.Sub(capacity, 1), age)
    turned = emit.And(emit.Greater(stored, capacity), emit.GreaterOrEqual(slots, sinks))
    return str(emit.Where(turned, by_age, slots))


def _rotated(emit: Emitter, x: Value, positions: Value) -> Value:
    """Rotate `x` [B,heads,n,D] to `positions` [B,n] in fp32, rounded like keys that are stored rotated."""
    return str(emit.CastLike(emit.RotaryEmbedding(float32(emit, x), "cosine", "sine", positions), x))


RECENT_ATTENTION = Operator(
    name="KvcRecentAttention",
    summary="Write one token over the oldest that is no sink, attend to all entries.",
    inputs=(*STEP, CACHE_LENGTHS),
    outputs=(OUTPUT, updated(K_CACHE), updated(V_CACHE)),
    attributes=(CAPACITY, SINKS),
    write=_write_recent,
    stores=True,
)

RANKED_RECENT_ATTENTION = Operator(
    name="KvcRankedRecentAttention",
    summary="KvcRecentAttention with positions counted in the cache.",
    inputs=(*STEP, CACHE_LENGTHS, *TABLES),
    outputs=(OUTPUT, updated(K_CACHE), updated(V_CACHE)),
    attributes=(CAPACITY, SINKS),
    write=_write_ranked,
    stores=True,
)
