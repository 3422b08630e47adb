"""Write one new entry per row and KV head into a cache.

If the executor binds one buffer as both cache and result, a scatter writes only the new entry. Nothing else may read
the old cache, or the executor has to keep it and copies all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.fp8_bounds import write_codes, write_ranks
from kvc_trt.operators.shapes import HeadShape, Layout, bounds_of_read, count_to, float32, size
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.operators.vectors import stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value
    from kvc_trt.operators.vectors import Tables


class Place:
    """The slot of each row's new entry: `slots` if given, otherwise slot `lengths[b]` of row b, for `lengths` [B]."""

    def __init__(self, emit: Emitter, lengths: Value, shape: HeadShape, slots: Value | None = None) -> None:
        self._emit, self._shape = emit, shape
        self.slots: Value = emit.Reshape(lengths, [-1, 1, 1, 1]) if slots is None else slots
        """INT64 [B,1,1,1], or [B,G,1,1] where heads differ"""
        self._rows: Value = emit.Reshape(count_to(emit, size(emit, lengths, 0)), [-1, 1, 1, 1])

    def store(self, new: Tables, layout: Layout) -> Tables:
        """Return the caches with `new`, one entry as it is stored, in them."""
        return stored_tables(layout, K_CACHE, V_CACHE).with_new(new, self.append)

    def append(self, cache: Value, entry: Value) -> Value:
        """Return `cache` [B,G,C,.] with `entry` [B,G,.] in its slot."""
        return str(self._emit.ScatterND(cache, self._slot_indices(cache), entry))

    def append_columns(self, cache: Value, entry: Value) -> Value:
        """Return the channel-major `cache` [B,G,D,C] with `entry` [B,G,D] stored."""
        heads, channels = np.indices((self._shape.fixed_kv_heads, self._shape.head_size))
        grid = np.stack([0 * heads, heads, channels, 0 * heads], axis=-1)[None]
        return str(self._emit.ScatterND(cache, self._indices(self.slots, grid), entry))

    def raise_bounds(self, bounds: Value, key: Value, page: Value, layout: Layout) -> Value:
        """Return `bounds` [B,G,2D,P] (channel maxima of K and of -K) with `key` [B,G,D] in page `page` [B,1,1,1].

        The key is as it is read."""
        emit = self._emit
        column = emit.Concat(key, emit.Neg(key), axis=2)
        if layout.fp8_bounds:
            return self._raise_codes(bounds, write_codes(emit, float32(emit, column)), page)
        if layout.cache_format.keys is not None:
            column = bounds_of_read(emit, column, layout)
        if layout.dtype != "float32":  # twice as slow, but ONNX Runtime's ScatterND has no maximum of half floats
            column = emit.Unsqueeze(column, [3])
            pages = emit.Expand(page, emit.Shape(column))
            return str(emit.ScatterElements(bounds, pages, column, axis=3, reduction="max"))
        return str(emit.ScatterND(bounds, self._column_of(page), column, reduction="max"))

    def first_rows(self, capacity: int | Value) -> Value:
        """Return INT64 [B,G,1]: the row of each head's slot 0 in a cache [B,G,C,D] reshaped to [B*G*C,D]."""
        emit, kv_heads = self._emit, self._shape.fixed_kv_heads
        heads = np.arange(kv_heads, dtype=np.int64)[None, :, None]
        if isinstance(capacity, int):
            row = emit.Reshape(emit.Mul(self._rows, kv_heads * capacity), [-1, 1, 1])
            return str(emit.Add(row, heads * capacity))
        row = emit.Reshape(emit.Mul(self._rows, kv_heads), [-1, 1, 1])
        return str(emit.Mul(emit.Add(row, heads), capacity))

    def _raise_codes(self, bounds: Value, column: Value, page: Value) -> Value:
        """Return the fp8 `bounds` with the maximum of page `page` and `column` INT8 [B,G,2D] in their place."""
        emit, places = self._emit, self._column_of(page)
        before = emit.GatherND(bounds, places)
        stays = emit.GreaterOrEqual(write_ranks(emit, before), write_ranks(emit, column))
        return str(emit.ScatterND(bounds, places, emit.Where(stays, before, column)))

    def _column_of(self, page: Value) -> Value:
        """Return the indices of the bounds of page `page` [B,1,1,1], INT64 [B,G,2D,4]."""
        heads, channels = np.indices((self._shape.fixed_kv_heads, 2 * self._shape.head_size))
        return self._indices(page, np.stack([0 * heads, heads, channels, 0 * heads], axis=-1)[None])

    def _slot_indices(self, cache: Value) -> Value:
        """Return the index of the new entry in every row and head, INT64 [B,G,3]."""
        if self._shape.kv_heads is None:
            return self._slot_indices_of(cache)
        heads = np.arange(self._shape.kv_heads)
        grid = np.stack([0 * heads, heads, 0 * heads], axis=-1)[None, :, None]
        return str(self._emit.Squeeze(self._indices(self.slots, grid), [2]))

    def _slot_indices_of(self, cache: Value) -> Value:
        """`_slot_indices` for as many heads as the cache has."""
        emit, count = self._emit, size(self._emit, cache, 1)
        heads = emit.Reshape(count_to(emit, count), [1, -1, 1])
        each = emit.Concat(size(emit, cache, 0), count, [1], axis=0)
        parts = (emit.Squeeze(self._rows, [3]), heads, emit.Squeeze(self.slots, [3]))
        return str(emit.Concat(*(emit.Expand(part, each) for part in parts), axis=2))

    def _indices(self, last: Value, grid: np.ndarray) -> Value:
        """Return index tuples: `grid` [1,.,.,n] with the row added in front and `last` [B,.,1,1] at the end."""
        emit, width = self._emit, grid.shape[-1]
        first_axis, last_axis = np.eye(width, dtype=np.int64)[[0, -1]]
        moving = emit.Add(emit.Mul(self._rows, first_axis), emit.Mul(last, last_axis))
        return str(emit.Add(moving, grid.astype(np.int64)))
