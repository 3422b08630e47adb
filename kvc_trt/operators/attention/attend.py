"""Grouped attention of one decode step, shared by all operators so that their results are bit-identical.

The g query heads that share a KV head are the rows of one matrix product, so keys and values are never repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc_trt.operators.shapes import MASKED, HeadShape, Layout, count_to, float32, size
from kvc_trt.operators.softmax import SoftmaxForm, probabilities

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value
    from kvc_trt.operators.vectors import Tables


@dataclass(frozen=True)
class GroupedQuery:
    """A step's queries, fp32, grouped by KV head."""

    plain: Value
    """[B,G,g,D], unscaled"""
    scaled: Value
    """[B,G,g,D], divided by sqrt(D)"""
    softmax: SoftmaxForm
    sinks: Value | None
    """[G,g,1], if the softmax has sinks"""


def group_query(emit: Emitter, query: Value, layout: Layout, cache: Value = "k_cache") -> GroupedQuery:
    """Group `query` [B,H,D] by the KV heads of `cache`."""
    shape, softmax = layout.shape, layout.softmax
    plain = emit.Reshape(float32(emit, query), shape.grouped(emit, cache))
    sinks = softmax.grouped_sinks(emit, cache, 1)
    return GroupedQuery(plain, emit.Mul(plain, 1 / math.sqrt(shape.head_size)), softmax, sinks)


def attend(emit: Emitter, query: GroupedQuery, keys: Value, values: Value, visible: Value) -> Value:
    """Softmax attention to `keys`, `values` [B,G,n,D] where `visible` (BOOL, broadcast to [B,G,g,n]); -> [B,G,g,D]."""
    return attend_and_show(emit, query, keys, values, visible)[0]


def attend_and_show(
    emit: Emitter, query: GroupedQuery, keys: Value, values: Value, visible: Value
) -> tuple[Value, Value]:
    """Like `attend`, but also return the attention probabilities [B,G,g,n]."""
    scores = emit.MatMul(query.scaled, emit.Transpose(float32(emit, keys), perm=[0, 1, 3, 2]))
    masked = emit.Where(visible, query.softmax.capped(emit, scores), MASKED)
    weights = probabilities(emit, masked, query.sinks)
    return emit.MatMul(weights, float32(emit, values)), weights


def attend_slots(emit: Emitter, query: GroupedQuery, keys: Value, values: Value, lengths: Value) -> Value:
    """Attention over the first `lengths` [B,1,1,1] slots of `keys`, `values` [B,G,n,D], read in place."""
    visible = emit.Less(count_to(emit, size(emit, keys, 2)), lengths)
    return attend(emit, query, keys, values, visible)


def attend_first(emit: Emitter, query: GroupedQuery, tables: Tables, lengths: Value, longest: Value) -> Value:
    """`attend_slots` over a copy of the first `longest` (scalar) slots: work grows with the rows, not the capacity."""
    return attend_slots(emit, query, *tables.first(emit, longest).read(emit), lengths)


def ungroup(emit: Emitter, output: Value, query: Value, shape: HeadShape) -> Value:
    """Return `output` [B,G,g,D] in the shape and type of `query` [B,H,D]."""
    return str(emit.CastLike(emit.Reshape(output, shape.flat(emit, query)), query))
