"""KvcJoinBlock, KvcJoinInOrder: stored and new tokens in one table, for attention and for a compaction over both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.attention.heavy_hitter_attention import SLOT_POSITIONS
from kvc_trt.operators.schema import INT32, INT64, Kernel, Operator, Tensor
from kvc_trt.operators.shapes import Layout, int32, size
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.operators.turns.append_block import K_BLOCK, LENGTHS, V_BLOCK, BlockPlaces
from kvc_trt.operators.turns.extend_attention import STORED_BEFORE, TURN_KEYS, TURN_VALUES
from kvc_trt.operators.vectors import NEW, Tables, stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

JOINED_KEYS, JOINED_VALUES = (replace(table, shape=("B", "G", "C+M", "D")) for table in (TURN_KEYS, TURN_VALUES))
JOINED_LENGTHS = Tensor("joined_lengths", INT64, ("B",), "stored and new tokens")
UNUSED = np.int32(2**31 - 1)


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcJoinBlock: the first cache_lengths[b] slots hold tokens, the new ones follow."""
    return _joined(emit, layout, stored_tables(layout, K_CACHE, V_CACHE))


def _write_in_order(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcJoinInOrder: stored tokens are in any slot, and come in the order of their positions."""
    empty = emit.Less("slot_positions", np.int32(0))
    places = emit.Where(empty, UNUSED, "slot_positions")
    _, order = emit.TopK(places, size(emit, "slot_positions", 2), outputs=2, axis=2, largest=0)
    rows = emit.Unsqueeze(order, [3])
    caches = stored_tables(layout, K_CACHE, V_CACHE).map(lambda part: emit.GatherND(part, rows, batch_dims=2))
    positions = emit.GatherElements("slot_positions", order, axis=2)
    return {**_joined(emit, layout, caches), "order": int32(emit, order), "ordered_positions": positions}


def _joined(emit: Emitter, layout: Layout, caches: Tables) -> dict[str, Value]:
    places = BlockPlaces(emit)
    room = emit.Concat([0], size(emit, "k_new", 2), axis=0)

    def joined(part: Value, new: Value) -> Value:
        return places.write(str(emit.Pad(part, room, emit.CastLike(np.float32(0), part), [2])), new)

    found = caches.with_new(NEW.stored(emit, layout), joined)
    return {**found.named(JOINED_KEYS, JOINED_VALUES), "joined_lengths": emit.Add("cache_lengths", "lengths")}


JOIN_BLOCK = Operator(
    name="KvcJoinBlock",
    summary="Stored and new tokens of a turn in one table.",
    inputs=(K_BLOCK, V_BLOCK, K_CACHE, V_CACHE, STORED_BEFORE, LENGTHS),
    outputs=(JOINED_KEYS, JOINED_VALUES, JOINED_LENGTHS),
    write=_write,
    stores=True,
    kernel=Kernel("kvc_join_block", "KvcJoinBlockParams"),
)
JOIN_IN_ORDER = Operator(
    name="KvcJoinInOrder",
    summary="KvcJoinBlock for caches whose slots are not in the order of the text.",
    inputs=(K_BLOCK, V_BLOCK, K_CACHE, V_CACHE, SLOT_POSITIONS, STORED_BEFORE, LENGTHS),
    outputs=(
        JOINED_KEYS,
        JOINED_VALUES,
        JOINED_LENGTHS,
        Tensor("order", INT32, ("B", "G", "C"), "the slot of each entry, by position; empty slots last"),
        Tensor("ordered_positions", INT32, ("B", "G", "C"), "their positions"),
    ),
    write=_write_in_order,
    stores=True,
    native=False,
)
