"""KvcExtendAttention: exact attention of a turn's new tokens to everything stored, and causally to each other.

One iteration per block of queries, over the entries up to the block's end: memory is linear in the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.operators.schema import CACHE, INT64, Operator, Tensor
from kvc_trt.operators.shapes import MASKED, Layout, attention_scale, count_to, float32, one, scalar, size
from kvc_trt.operators.softmax import PLAIN, SoftmaxForm, probabilities
from kvc_trt.operators.vectors import Vectors, stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

TURN_QUERIES = Tensor("q", CACHE, ("B", "H", "M", "D"), "of the new tokens, after RoPE; padded on the right")
TURN_KEYS = Tensor(
    "k",
    CACHE,
    ("B", "G", "T", "D"),
    "the stored entries, then the new ones; after RoPE",
    stored="keys",
    parts_as="joined_k",
)
TURN_VALUES = Tensor("v", CACHE, ("B", "G", "T", "D"), stored="values", parts_as="joined_v")
STORED_BEFORE = Tensor("cache_lengths", INT64, ("B",), "entries before the new ones")


TooOld: TypeAlias = "Callable[[Emitter, Value, Value], Value]"
"""Writes which of the first `end` [1] entries the queries at some places [b] of a turn do not see: BOOL [B,1,1,b,end].
"""


@dataclass(frozen=True)
class QueryBlocks:
    """The queries of a turn, cut into blocks of equal size."""

    rows: Value
    """FLOAT [B,G,g,n*b,D], divided by sqrt(D); zeros past the turn's end."""
    size: Value
    """INT64 [1]: queries of a block, at most PROMPT_BLOCK."""
    count: Value
    """Scalar: number of blocks."""
    softmax: SoftmaxForm
    sinks: Value | None
    """FLOAT [G,g,1,1], if the softmax has sinks."""


def query_blocks(emit: Emitter, softmax: SoftmaxForm = PLAIN) -> QueryBlocks:
    """Cut the queries `q` over the KV heads of `k`."""
    heads = emit.Concat([0], size(emit, "k", 1), [-1], size(emit, "q", 2), size(emit, "q", 3), axis=0)
    query = emit.Reshape(emit.Mul(float32(emit, "q"), attention_scale(emit, "q", 3)), heads)
    block = emit.Min(size(emit, "q", 2), [PROMPT_BLOCK])
    count = emit.Div(emit.Sub(emit.Add(size(emit, "q", 2), block), 1), block)
    missing = emit.Sub(emit.Mul(count, block), size(emit, "q", 2))
    padded = emit.Pad(query, emit.Concat([0], missing, axis=0), np.float32(0), [3])
    sinks = softmax.grouped_sinks(emit, "k", 2)
    return QueryBlocks(padded, block, scalar(emit, count), softmax, sinks)


def weights_of_turn(
    emit: Emitter, blocks: QueryBlocks, keys: Vectors, index: Value, stored: Value = "cache_lengths",
    too_old: TooOld | None = None,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """Return the attention FLOAT [B,G,g,b,end] of block `index` to the first of `keys`, `stored` [B] of them old.

    `too_old` says which of these are hidden besides those that come later. Also return their number `end`, INT64 [1],
    and the place in the turn of each of the block's queries, INT64 [b].
    """
    start = one(emit, emit.Mul(index, scalar(emit, blocks.size)))
    rows = emit.Slice(blocks.rows, start, emit.Add(start, blocks.size), [3])
    places = emit.Add(count_to(emit, blocks.size), start)
    longest = emit.Add(emit.ReduceMax(stored), emit.Add(start, blocks.size))
    end = emit.Min(longest, size(emit, "k", 2))
    matrix = emit.Reshape(rows, emit.Concat([0, 0, -1], size(emit, "q", 3), axis=0))
    seen = keys.map(lambda part: emit.Slice(part, [0], end, [2])).widened(emit)
    scores = emit.MatMul(matrix, emit.Transpose(seen, perm=[0, 1, 3, 2]))
    by_head = emit.Reshape(scores, emit.Concat(emit.Shape(rows, end=-1), [-1], axis=0))
    last_seen = emit.Add(emit.Reshape(stored, [-1, 1, 1, 1, 1]), emit.Unsqueeze(places, [1]))
    hidden = emit.Greater(count_to(emit, end), last_seen)
    if too_old is not None:
        hidden = emit.Or(hidden, too_old(emit, places, end))
    masked = emit.Where(hidden, MASKED, blocks.softmax.capped(emit, by_head))
    return probabilities(emit, masked, blocks.sinks), end, places


def write_extend(
    emit: Emitter, layout: Layout, stored: Value = "cache_lengths", too_old: TooOld | None = None
) -> Mapping[str, Value]:
    """Write the body of KvcExtendAttention; query i of row b sees the first stored[b] + i + 1 entries.

    `too_old` says which of these it does not see."""
    blocks, tables = query_blocks(emit, layout.softmax), stored_tables(layout, TURN_KEYS, TURN_VALUES)
    last = emit.Sub(blocks.count, 1)

    def block(body: Emitter, iteration: Value) -> Value:
        weights, end, _ = weights_of_turn(body, blocks, tables.keys, body.Sub(last, iteration), stored, too_old)
        matrix = body.Reshape(weights, body.Concat([0, 0, -1], end, axis=0))
        values = tables.values.map(lambda part: body.Slice(part, [0], end, [2])).widened(body)
        attended = body.MatMul(matrix, values)
        by_head = body.Concat(body.Shape(weights, end=-1), [-1], axis=0)
        return str(body.Reshape(attended, by_head))

    # From the last block, which needs most memory, to the first, so that the others reuse its memory.
    found = emit.Slice(emit.collect(blocks.count, block), [-1], [np.iinfo(np.int64).min], [0], [-1])
    in_order = emit.Transpose(found, perm=[1, 2, 3, 0, 4, 5])
    rows = emit.Reshape(in_order, emit.Shape(blocks.rows))
    return {"o": emit.CastLike(emit.Reshape(emit.Slice(rows, [0], size(emit, "q", 2), [3]), emit.Shape("q")), "q")}


EXTEND_ATTENTION = Operator(
    name="KvcExtendAttention",
    summary="Exact attention of a turn's tokens to everything stored, and causally to each other.",
    inputs=(TURN_QUERIES, TURN_KEYS, TURN_VALUES, STORED_BEFORE),
    outputs=(Tensor("o", CACHE, ("B", "H", "M", "D")),),
    write=write_extend,
    attends=True,
    stores=True,
)
