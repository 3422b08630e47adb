"""KvcRecentAttention, KvcRankedRecentAttention: overwrite the oldest entry that is not a sink, attend to all entries.

Source: StreamingLLM (arXiv 2309.17453), section 3; exact rule in docs/policies/. The slots after the sinks are a ring:
an entry stays in its slot until it is overwritten, so once the ring has wrapped, slots are not in text order. In the
operators "ByRow" each row's ring has a length of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.append import Place
from kvc_trt.operators.attention.attend import attend_first, attend_slots, group_query, ungroup
from kvc_trt.operators.attention.stored_rows import CAPACITIES, StoredRows
from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.schema import FLOAT, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import Layout, float32, one
from kvc_trt.operators.tensors import CACHE_LENGTHS, CAPACITY, K_CACHE, OUTPUT, STEP, V_CACHE, updated
from kvc_trt.operators.vectors import NEW, Tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

TABLES = (Tensor("cosine", FLOAT, ("R", "D/2")), Tensor("sine", FLOAT, ("R", "D/2")))
"""Tables of the rotary embedding, one row per position."""
SINKS = Attribute("sinks", 0, MAX_TOKENS, "first tokens, which are never overwritten", at_most="capacity")


def _write_recent(emit: Emitter, layout: Layout, *, by_row: bool = False) -> Mapping[str, Value]:
    """Write the body of KvcRecentAttention.

    `cache_lengths` counts all tokens ever stored. While every row fits, this is the code of KvcDenseAttention on the
    same slice.
    """
    shape = layout.shape
    ring = _append(emit, layout, by_row=by_row)
    query = group_query(emit, "query", layout)

    def sliced(branch: Emitter) -> list[Value]:
        return [attend_first(branch, query, ring.tables, ring.rows.entries, ring.rows.longest)]

    def in_place(branch: Emitter) -> list[Value]:
        return [attend_slots(branch, query, *ring.tables.read(branch), ring.rows.entries)]

    attended = emit.choose(ring.rows.sliced, sliced, in_place, outputs=1)
    return {"output": ungroup(emit, attended, "query", shape), **ring.state(emit)}


def _write_ranked(emit: Emitter, layout: Layout, *, by_row: bool = False) -> Mapping[str, Value]:
    """Write the body of KvcRankedRecentAttention; queries and keys are unrotated.

    Every step rotates the keys by their rank among the cache's entries: the sinks first, then the oldest to the newest.
    """
    shape = layout.shape
    ring = _append(emit, layout, by_row=by_row)
    last = emit.Sub(ring.rows.capacity, 1)
    newest = emit.Reshape(emit.Min(emit.Sub(ring.rows.stored, 1), last), [-1, 1])
    turned = _rotated(emit, emit.Unsqueeze("query", [2]), newest)
    query = group_query(emit, emit.Squeeze(turned, [2]), layout)

    def attended_first(branch: Emitter, ranks: Value) -> list[Value]:
        keys, values = ring.tables.first(branch, ring.rows.longest).read(branch)
        return [attend_slots(branch, query, _rotated(branch, keys, ranks), values, ring.rows.entries)]

    def sliced(branch: Emitter) -> list[Value]:
        if by_row:
            ranks = branch.Slice(_ranks(branch, ring), [0], one(branch, ring.rows.longest), [1])
        else:
            ranks = branch.Expand(branch.Range(0, ring.rows.longest, 1), branch.Shape(newest))
        return attended_first(branch, ranks)

    def in_place(branch: Emitter) -> list[Value]:
        keys, values = ring.tables.read(branch)
        rotated = _rotated(branch, keys, _ranks(branch, ring))
        return [attend_slots(branch, query, rotated, values, ring.rows.entries)]

    attended = emit.choose(ring.rows.sliced, sliced, in_place, outputs=1)
    return {"output": ungroup(emit, attended, "query", shape), **ring.state(emit)}


@dataclass(frozen=True)
class _Ring:
    """The cache after the append."""

    tables: Tables
    rows: StoredRows
    newest: Value
    """INT64 [B,1,1,1]: slot of the new token."""
    length: Value
    """The number of slots after the sinks: INT64 [B,1,1,1], a scalar if rows are alike."""
    by_row: bool

    def state(self, emit: Emitter) -> dict[str, Value]:
        """Return the updated state by the names of the outputs."""
        own = {updated(CAPACITIES).name: emit.Identity(CAPACITIES.name)} if self.by_row else {}
        return {**self.tables.named(updated(K_CACHE), updated(V_CACHE)), **own}


def _append(emit: Emitter, layout: Layout, *, by_row: bool) -> _Ring:
    sinks, before = emit.attribute("sinks"), emit.Reshape("cache_lengths", [-1, 1, 1, 1])
    rows = StoredRows(emit, emit.Add(before, 1), by_row=by_row)
    length = emit.Sub(rows.capacity, sinks)
    turning = emit.Add(emit.Mod(emit.Sub(before, sinks), length), sinks)
    newest = emit.Where(emit.Less(before, rows.capacity), before, turning)
    place = Place(emit, "cache_lengths", layout.shape, newest)
    tables = place.store(NEW.stored_at_once(emit, layout), layout)
    return _Ring(tables, rows, newest, length, by_row)


def _ranks(emit: Emitter, ring: _Ring) -> Value:
    """Return the rank of the entry in each slot, INT64 [B,C]; undefined for empty slots."""
    slots = emit.Range(0, emit.attribute("capacity"), 1)
    capacity, length = ring.rows.capacity, ring.length
    if ring.by_row:
        capacity, length = (emit.Squeeze(value, [2, 3]) for value in (capacity, length))
    stored, newest = (emit.Squeeze(value, [2, 3]) for value in (ring.rows.stored, ring.newest))
    age = emit.Mod(emit.Sub(newest, slots), length)
    by_age = emit.Sub(emit.Sub(capacity, 1), age)
    turned = emit.And(emit.Greater(stored, capacity), emit.GreaterOrEqual(slots, emit.attribute("sinks")))
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
    attends=True,
    stores=True,
)

RANKED_RECENT_ATTENTION = Operator(
    name="KvcRankedRecentAttention",
    summary="KvcRecentAttention with positions counted in the cache.",
    inputs=(*STEP, CACHE_LENGTHS, *TABLES),
    outputs=(OUTPUT, updated(K_CACHE), updated(V_CACHE)),
    attributes=(CAPACITY, SINKS),
    write=_write_ranked,
    attends=True,
    stores=True,
)


RECENT_ATTENTION_BY_ROW = replace(
    RECENT_ATTENTION,
    name="KvcRecentAttentionByRow",
    summary="KvcRecentAttention with a ring of its own length for each row.",
    inputs=(*RECENT_ATTENTION.inputs, CAPACITIES),
    outputs=(*RECENT_ATTENTION.outputs, updated(CAPACITIES)),
    write=partial(_write_recent, by_row=True),
    native=False,
)

RANKED_RECENT_ATTENTION_BY_ROW = replace(
    RANKED_RECENT_ATTENTION,
    name="KvcRankedRecentAttentionByRow",
    summary="KvcRankedRecentAttention with a ring of its own length for each row.",
    inputs=(*RANKED_RECENT_ATTENTION.inputs, CAPACITIES),
    outputs=(*RANKED_RECENT_ATTENTION.outputs, updated(CAPACITIES)),
    write=partial(_write_ranked, by_row=True),
    native=False,
)
