"""Writing one new entry per row and KV head into a cache."""

from __future__ import annotations

import numpy as np

from kvc_trt.graph.emitter import Emitter, Value
from kvc_trt.graph.functions.shapes import count_to, size


def slot_indices(emit: Emitter, lengths: Value, keys: Value) -> Value:
    """ScatterND indices INT64 [B,G,3] of slot `lengths[b]` in row b of every head of `keys` [B,G,C,D]."""
    row_axis, head_axis, slot_axis = np.eye(3, dtype=np.int64)
    rows = emit.Mul(emit.Reshape(count_to(emit, size(emit, lengths, 0)), [-1, 1, 1]), row_axis)
    heads = emit.Mul(emit.Reshape(count_to(emit, size(emit, keys, 1)), [1, -1, 1]), head_axis)
    slots = emit.Mul(emit.Reshape(lengths, [-1, 1, 1]), slot_axis)
    return str(emit.Add(emit.Add(rows, slots), heads))


def append(emit: Emitter, cache: Value, indices: Value, entry: Value) -> Value:
    """`cache` [B,G,C,D] with `entry` [B,G,D] stored at `indices`.

    ScatterND touches the new entry alone where the executor binds one buffer as cache and result; nothing else may
    read `cache`, or the executor has to keep the old state and copies.
    """
    return str(emit.ScatterND(cache, indices, entry))


def raise_bounds(emit: Emitter, bounds: Value, page: Value, key: Value) -> Value:
    """`bounds` [B,G,2D,P] after `key` [B,G,D] joined page `page` [B,1,1,1]: channel-wise maxima of K and of -K."""
    column = emit.Unsqueeze(emit.Concat(key, emit.Neg(key), axis=2), [3])
    pages = emit.Expand(page, emit.Shape(column))
    return str(emit.ScatterElements(bounds, pages, column, axis=3, reduction="max"))
