"""KvcAppendBlock, KvcRaiseBounds, KvcAppendChannels: store a turn's new tokens behind the entries of a cache.

If the executor binds one buffer as both cache and result, only the new entries are written (see `attention/append.py`).
Padding of a row is written as once more its last token, so that it needs no slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.attention.sparq_attention import CHANNELS, VALUE_SUM
from kvc_trt.operators.fp8_bounds import write_codes, write_ranks
from kvc_trt.operators.schema import CACHE, INT64, Kernel, Operator, Tensor
from kvc_trt.operators.shapes import Layout, bounds_of_read, count_to, float32, size
from kvc_trt.operators.tensors import BOUNDS, CACHE_LENGTHS, FP8_BOUNDS, K_CACHE, PAGE_SIZE, V_CACHE, updated
from kvc_trt.operators.vectors import NEW, stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

K_BLOCK = Tensor("k_new", CACHE, ("B", "G", "M", "D"), "after RoPE; padded on the right")
V_BLOCK = Tensor("v_new", CACHE, ("B", "G", "M", "D"))
LENGTHS = Tensor("lengths", INT64, ("B",), "new tokens of each row, 1..M")


class BlockPlaces:
    """The places of a block's tokens, and their entries, in which the row's last token replaces padding."""

    def __init__(self, emit: Emitter, block: Value = "k_new") -> None:
        self._emit = emit
        last = emit.Sub(emit.Reshape("lengths", [-1, 1]), 1)
        self._tokens: Value = emit.Min(count_to(emit, size(emit, block, 2)), last)
        """INT64 [B,M]: the token whose entry is written in each place."""
        self.slots: Value = emit.Add(emit.Reshape("cache_lengths", [-1, 1]), self._tokens)
        """INT64 [B,M]"""

    def entries(self, block: Value) -> Value:
        """Return `block` [B,G,M,D] without padding."""
        emit = self._emit
        index = emit.Expand(emit.Unsqueeze(self._tokens, [1, 3]), self._by_head(block))
        return str(emit.GatherND(block, index, batch_dims=2))

    def write(self, table: Value, block: Value) -> Value:
        """Return `table` [B,G,C,D] with `block` [B,G,M,D] at `slots`."""
        emit = self._emit
        by_head = self._by_head(block)
        rows, heads = (count_to(emit, size(emit, block, axis)) for axis in (0, 1))
        parts = (emit.Unsqueeze(rows, [1, 2, 3]), emit.Unsqueeze(heads, [0, 2, 3]), emit.Unsqueeze(self.slots, [1, 3]))
        index = emit.Concat(*(emit.Expand(part, by_head) for part in parts), axis=3)
        return str(emit.ScatterND(table, index, self.entries(block)))

    def _by_head(self, block: Value) -> Value:
        """Return the shape [B,G,M,1] of one number per token and head."""
        return str(self._emit.Concat(self._emit.Shape(block, end=3), [1], axis=0))


def by_channel(emit: Emitter, places: BlockPlaces, block: Value) -> Value:
    """Return `block` [B,G,M,D] without padding as [B,G,D,M]."""
    return str(emit.Transpose(places.entries(block), perm=[0, 1, 3, 2]))


def _write_append(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcAppendBlock: token i of row b goes to slot cache_lengths[b] + i."""
    places = BlockPlaces(emit)
    caches = stored_tables(layout, K_CACHE, V_CACHE)
    return caches.with_new(NEW.stored(emit, layout), places.write).named(updated(K_CACHE), updated(V_CACHE))


def _write_bounds(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcRaiseBounds: each token raises the maxima of its page."""
    places = BlockPlaces(emit)
    keys = by_channel(emit, places, NEW.keys.stored(emit, layout.cache_format.keys).read(emit))
    columns = emit.Concat(keys, emit.Neg(keys), axis=2)
    if layout.cache_format.keys is not None and not layout.fp8_bounds:
        columns = bounds_of_read(emit, columns, layout)
    pages = emit.Unsqueeze(emit.Div(places.slots, emit.attribute("page_size")), [1, 2])
    where = emit.Expand(pages, emit.Shape(columns))
    if not layout.fp8_bounds:
        return {"bounds_out": emit.ScatterElements("bounds", where, columns, axis=3, reduction="max")}
    stored, new = write_ranks(emit, "bounds"), write_ranks(emit, write_codes(emit, float32(emit, columns)))
    raised = emit.ScatterElements(stored, where, new, axis=3, reduction="max")
    return {"bounds_out": emit.cast(write_ranks(emit, raised), np.int8)}


def _write_channels(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcAppendChannels."""
    places, stored = BlockPlaces(emit), NEW.stored(emit, layout)
    columns = by_channel(emit, places, stored.keys.codes(emit))
    where = emit.Expand(emit.Unsqueeze(places.slots, [1, 2]), emit.Shape(columns))
    real = emit.Less(count_to(emit, size(emit, "v_new", 2)), emit.Reshape("lengths", [-1, 1]))
    values = emit.Where(emit.Unsqueeze(real, [1, 3]), stored.values.widened(emit), np.float32(0))
    return {
        "channels_out": emit.ScatterElements("channels", where, columns, axis=3),
        "value_sum_out": emit.Add("value_sum", emit.ReduceSum(values, [2], keepdims=0)),
    }


APPEND_BLOCK = Operator(
    name="KvcAppendBlock",
    summary="Store a turn's keys and values behind the entries of a cache.",
    inputs=(K_BLOCK, V_BLOCK, K_CACHE, V_CACHE, CACHE_LENGTHS, LENGTHS),
    outputs=(updated(K_CACHE), updated(V_CACHE)),
    write=_write_append,
    stores=True,
    kernel=Kernel("kvc_append_block", "KvcAppendBlockParams"),
    native=False,
)
RAISE_BOUNDS = Operator(
    name="KvcRaiseBounds",
    summary="Let the bounds of the pages cover a turn's keys.",
    inputs=(K_BLOCK, BOUNDS, CACHE_LENGTHS, LENGTHS),
    outputs=(updated(BOUNDS),),
    attributes=(PAGE_SIZE, FP8_BOUNDS),
    write=_write_bounds,
    stores=True,
    kernel=Kernel("kvc_raise_bounds", "KvcRaiseBoundsParams"),
    native=False,
)
APPEND_CHANNELS = Operator(
    name="KvcAppendChannels",
    summary="Store a turn's keys channel by channel, and add its values to their sum.",
    inputs=(K_BLOCK, V_BLOCK, CHANNELS, VALUE_SUM, CACHE_LENGTHS, LENGTHS),
    outputs=(updated(CHANNELS), updated(VALUE_SUM)),
    write=_write_channels,
    stores=True,
    native=False,
)
