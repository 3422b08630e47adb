"""KvcKeepPositions: the logical positions of the entries that a compaction after a turn kept.

A decode step does not record the position of the token that it appends. It does not have to: since the last compaction
all tokens were stored one behind the other, so an entry without a recorded position is as far before the turn's first
token in the text as in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.attention.heavy_hitter_attention import SLOT_POSITIONS
from kvc_trt.operators.schema import INT32, INT64, Operator, Tensor
from kvc_trt.operators.shapes import Layout, int32, size
from kvc_trt.operators.tensors import updated
from kvc_trt.operators.turns.extend_attention import STORED_BEFORE

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body: index j of stored and new tokens is at positions[b] + j - cache_lengths[b], if none is recorded.

    The recorded positions are read into every result, so that both may share a buffer.
    """
    chosen = emit.Max("indices", np.int32(0))
    last = int32(emit, emit.Sub(size(emit, "slot_positions", 2), 1))
    recorded = emit.GatherElements("slot_positions", emit.Min(chosen, last), axis=2)
    stored = int32(emit, emit.Reshape("cache_lengths", [-1, 1, 1]))
    start = int32(emit, emit.Reshape("positions", [-1, 1, 1]))
    known = emit.And(emit.Less(chosen, stored), emit.GreaterOrEqual(recorded, np.int32(0)))
    found = emit.Where(known, recorded, emit.Add(emit.Sub(chosen, stored), start))
    return {"slot_positions_out": emit.Where(emit.Less("indices", np.int32(0)), np.int32(-1), found)}


KEEP_POSITIONS = Operator(
    name="KvcKeepPositions",
    summary="The logical positions of what a compaction after a turn kept.",
    inputs=(
        SLOT_POSITIONS,
        STORED_BEFORE,
        Tensor("positions", INT64, ("B",), "of the turn's first tokens in the text"),
        Tensor("indices", INT32, ("B", "G", "C"), "kept entries of stored and new tokens, -1 past the row's end"),
    ),
    outputs=(updated(SLOT_POSITIONS),),
    write=_write,
    native=False,
)
