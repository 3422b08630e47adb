"""KvcHeavyHitterAttention: append one token, attend to every entry, drop the one that received the least attention.

Source: H2O (arXiv 2306.14048), section 4; exact rule in docs/policies/. Each KV head drops its own entry, and the
next token takes the free slot, so the order of slots is not that of the text. In KvcHeavyHitterAttentionByRow each row
uses a number of slots of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.attention.append import Place
from kvc_trt.operators.attention.attend import attend_and_show, group_query, ungroup
from kvc_trt.operators.attention.stored_rows import CAPACITIES, RECENTS, StoredRows, own_recents
from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.schema import FLOAT, INT32, INT64, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import Layout, count_to, int32, pad_end, size
from kvc_trt.operators.tensors import CACHE_LENGTHS, CAPACITY, K_CACHE, OUTPUT, STEP, V_CACHE, updated
from kvc_trt.operators.vectors import NEW, Tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

SCORES = Tensor("scores", FLOAT, ("B", "G", "C"), "attention that each entry has received")
SLOT_POSITIONS = Tensor(
    "slot_positions", INT32, ("B", "G", "C"), "position of each entry in the text, -1 in an empty slot", fill=-1.0
)
RECENT = Attribute("recent", 0, MAX_TOKENS, "last tokens, which always stay", at_most="capacity")
NOT_A_NUMBER = -1.0
NEVER = np.float32(3e38)
"""Score of an entry that must not be dropped, above every real score."""
EMPTY = np.int32(-1)


def _write(emit: Emitter, layout: Layout, *, by_row: bool = False) -> Mapping[str, Value]:
    """Write the body. A row that uses all its slots drops one entry: the one of least score that is not among the last
    `recent` tokens, the last one among equals."""
    step = AppendedToFree(emit, layout, by_row=by_row)
    output, received = step.attend()
    score = emit.Add("scores", received)
    dropped = step.least(score)
    return {
        "output": output,
        **step.state(),
        "scores_out": emit.Where(dropped, 0.0, score),
        "slot_positions_out": emit.Where(dropped, EMPTY, step.occupied),
    }


class AppendedToFree:
    """A step after its append: one token is stored in the free slot of each KV head, nothing is dropped yet.

    `cache_lengths` counts the prompt's entries and every token since; `positions` are the new tokens' text positions.
    """

    def __init__(self, emit: Emitter, layout: Layout, *, by_row: bool = False) -> None:
        self._emit, self._layout, self._by_row = emit, layout, by_row
        free = emit.ArgMin("slot_positions", axis=2)
        place = Place(emit, "cache_lengths", layout.shape, emit.Unsqueeze(free, [3]))
        self._tables = place.store(NEW.stored_at_once(emit, layout), layout)
        self._new: Value = int32(emit, emit.Reshape("positions", [-1, 1, 1]))
        taken = emit.Equal(emit.Range(0, emit.attribute("capacity"), 1), free)
        self.occupied: Value = emit.Where(taken, self._new, "slot_positions")
        """INT32 [B,G,C]: position of each entry, the new one included."""
        self._rows = StoredRows(emit, emit.Add(emit.Reshape("cache_lengths", [-1, 1, 1, 1]), 1), by_row=by_row)

    def state(self) -> dict[str, Value]:
        """Return the caches after the append, and the rows' capacities, by the names of the outputs."""
        own = {updated(CAPACITIES).name: self._emit.Identity(CAPACITIES.name)} if self._by_row else {}
        return {**self._tables.named(updated(K_CACHE), updated(V_CACHE)), **own}

    def attend(self) -> tuple[Value, Value]:
        """Return attention to all entries [B,H,D], and the attention that each entry received from its group, FLOAT
        [B,G,C].

        While every row fits, this is the code of KvcDenseAttention on the same slice.
        """
        emit, capacity = self._emit, self._emit.attribute("capacity")
        query = group_query(emit, "query", self._layout)

        def attended(branch: Emitter, tables: Tables) -> list[Value]:
            keys, values = tables.read(branch)
            visible = branch.Less(count_to(branch, size(branch, keys, 2)), self._rows.entries)
            output, weights = attend_and_show(branch, query, keys, values, visible)
            return [output, pad_end(branch, branch.ReduceSum(weights, [2], keepdims=0), capacity, np.float32(0))]

        def sliced(branch: Emitter) -> list[Value]:
            return attended(branch, self._tables.first(branch, self._rows.longest))

        def in_place(branch: Emitter) -> list[Value]:
            return attended(branch, self._tables)

        output, received = emit.choose(self._rows.sliced, sliced, in_place, outputs=2)
        return ungroup(emit, output, "query", self._layout.shape), received

    def least(self, score: Value) -> Value:
        """Mark the entry of least `score` [B,G or 1,C] (of equals the last) in rows that use all slots; BOOL [B,G,C].

        The last `recent` tokens are never marked."""
        emit, capacity = self._emit, self._rows.capacity
        recent = own_recents(emit, by_row=self._by_row)
        of_heads = emit.Squeeze(capacity, [3]) if self._by_row else capacity
        full = emit.GreaterOrEqual(emit.Squeeze(self._rows.stored, [3]), of_heads)
        contested = emit.LessOrEqual(self.occupied, emit.Sub(self._new, int32(emit, recent)))
        if self._by_row:  # slots past a row's capacity are empty even if the row is full
            contested = emit.And(contested, emit.Greater(self.occupied, EMPTY))
        rank = emit.Where(emit.GreaterOrEqual(score, 0.0), score, NOT_A_NUMBER)
        rank = emit.Where(emit.And(full, contested), rank, NEVER)
        least = emit.Equal(rank, emit.ReduceMin(rank, [2]))
        # Where nothing may be dropped, all ranks are NEVER.
        candidates = emit.Where(emit.And(least, emit.Less(rank, NEVER)), self.occupied, EMPTY)
        return str(emit.Equal(self.occupied, emit.ReduceMax(candidates, [2])))


HEAVY_HITTER_ATTENTION = Operator(
    name="KvcHeavyHitterAttention",
    summary="Append one token, attend to every entry, drop the one that received least attention.",
    inputs=(
        *STEP,
        SCORES,
        SLOT_POSITIONS,
        CACHE_LENGTHS,
        Tensor("positions", INT64, ("B",), "of the new tokens in the text"),
    ),
    outputs=(OUTPUT, updated(K_CACHE), updated(V_CACHE), updated(SCORES), updated(SLOT_POSITIONS)),
    attributes=(CAPACITY, RECENT),
    write=_write,
    stores=True,
)


HEAVY_HITTER_ATTENTION_BY_ROW = replace(
    HEAVY_HITTER_ATTENTION,
    name="KvcHeavyHitterAttentionByRow",
    summary="KvcHeavyHitterAttention with a number of slots of its own for each row.",
    inputs=(*HEAVY_HITTER_ATTENTION.inputs, CAPACITIES, RECENTS),
    outputs=(*HEAVY_HITTER_ATTENTION.outputs, updated(CAPACITIES)),
    attributes=(CAPACITY,),
    write=partial(_write, by_row=True),
    native=False,
)
