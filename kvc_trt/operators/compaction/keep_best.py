"""Compaction by rank, shared by the operators that score a prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.shapes import Layout, count_to, int32, into_slots, one, pad_end, size
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.operators.vectors import EXACT, Tables, Vectors

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

PROTECTED = np.float32(3e38)
"""Rank of a token that always stays; higher than every score."""
NOT_A_NUMBER, PADDING = np.float32(-2e38), np.float32(-3e38)
"""Ranks below every score, for a token whose score is NaN and for padding past a row's end."""
LAST_INDEX = np.int64(2**31 - 1)
"""Sorts behind every position."""


@dataclass(frozen=True)
class KeptValues:
    """The result of a compaction."""

    keys: Vectors
    """The n kept keys as they are stored, before they are put into the slots of a cache."""
    stored: Value
    """BOOL [B,1,n]: which of them are real, not padding."""
    positions: Value
    """INT64 [B,G,n]: their prompt positions, ascending; undefined for padding."""
    outputs: dict[str, Value]
    """The operator's outputs k_cache, v_cache with the tensors that their format adds, cache_lengths and indices."""


def keep_best(
    emit: Emitter, layout: Layout, rank: Callable[[Emitter], Value], tables: Tables = EXACT,
    budgets: Value | None = None,
) -> KeptValues:  # fmt: skip
    """Keep the `prompt_budget` tokens of highest rank of each row of `tables`; rows that fit keep everything.

    `rank` writes FLOAT [B,G,S]; it is not computed if all rows fit. The lowest index wins among equals. Kept vectors of
    exact tables are stored in the engine's format; stored ones move as they are. `budgets` INT64 [B] are the rows' own,
    at most `prompt_budget`.
    """
    largest = emit.attribute("prompt_budget")
    lengths = None if budgets is None else emit.Min("prompt_lengths", budgets)

    def best(branch: Emitter) -> Value:
        """Return the positions of the best tokens of each row, ascending."""
        if lengths is None:
            _, first = branch.TopK(rank(branch), one(branch, largest), outputs=2, axis=2, sorted=0)
            return str(branch.TopK(first, one(branch, largest), outputs=2, axis=2, largest=0)[0])
        width = branch.ReduceMax(lengths)
        _, first = branch.TopK(rank(branch), width, outputs=2, axis=2)
        own = branch.Less(count_to(branch, width), branch.Reshape(lengths, [-1, 1, 1]))
        ascending, _ = branch.TopK(branch.Where(own, first, LAST_INDEX), width, outputs=2, axis=2, largest=0)
        return str(branch.Min(ascending, branch.Sub(size(branch, "k", 2), 1)))

    def evict(branch: Emitter) -> list[Value]:
        kept = best(branch)
        where = branch.Unsqueeze(kept, [3])
        return [*(branch.GatherND(part, where, batch_dims=2) for part in tables.parts), kept]

    def keep(branch: Emitter) -> list[Value]:
        slots = branch.Min(size(branch, "k", 2), one(branch, largest))
        everything = branch.Expand(count_to(branch, slots), branch.Concat(branch.Shape("k", end=2), [1], axis=0))
        return [*(branch.Slice(part, [0], slots, [2]) for part in tables.parts), everything]

    if lengths is None:
        too_long = emit.Greater(emit.ReduceMax("prompt_lengths", keepdims=0), largest)
    else:
        too_long = emit.Greater(emit.ReduceMax(emit.Sub("prompt_lengths", lengths), keepdims=0), 0)
    *parts, kept = emit.choose(too_long, evict, keep, outputs=len(tables.parts) + 1)
    if lengths is None:
        lengths = emit.Min("prompt_lengths", largest)
    stored = emit.Less(count_to(emit, size(emit, parts[0], 2)), emit.Reshape(lengths, [-1, 1, 1]))
    held = tables.of(parts).stored(emit, layout)
    caches = held.map(lambda rows: into_slots(emit, rows, emit.Unsqueeze(stored, [3]))).named(K_CACHE, V_CACHE)
    indices = pad_end(emit, emit.Where(stored, kept, -1), emit.attribute("capacity"), np.int64(-1))
    outputs = {**caches, "cache_lengths": lengths, "indices": int32(emit, indices)}
    return KeptValues(held.keys, stored, kept, outputs)


def keep_with_scores(
    emit: Emitter, layout: Layout, scores: Value, rank: Callable[[Emitter], Value], tables: Tables = EXACT,
    budgets: Value | None = None,
) -> dict[str, Value]:  # fmt: skip
    """Keep tokens as `keep_best` does; the result has their `scores` and `slot_positions` too.

    `scores` is FLOAT [B,G,S]. `slot_positions` equals `indices`: the text position of each slot's token, -1 if empty.
    """
    kept = keep_best(emit, layout, rank, tables, budgets)
    gathered = emit.GatherElements(scores, kept.positions, axis=2)
    return {
        **kept.outputs,
        "scores": into_slots(emit, gathered, kept.stored),
        "slot_positions": emit.Identity(kept.outputs["indices"]),
    }


def among_row(emit: Emitter, scores: Value, contested: Value) -> Value:
    """Turn `scores` [B,G,S] into ranks: tokens that are not `contested` always stay, padding never does."""
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1, 1]), count_to(emit, size(emit, "k", 2))
    number = emit.Where(emit.Equal(scores, scores), scores, NOT_A_NUMBER)
    return str(emit.Where(emit.Less(columns, rows), emit.Where(contested, number, PROTECTED), PADDING))
