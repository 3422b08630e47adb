"""KvcPrefillAttention: exact causal attention over the prompt, in memory linear in its length.

One iteration per block of queries, over the keys up to the block's end. TensorRT builds use fused attention instead.

The queries are those of the last M tokens: of all in an engine's graph, of some where an executor runs a layer in
pieces. A query's result is the same bit for bit either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.operators.schema import CACHE, Operator, Tensor
from kvc_trt.operators.shapes import MASKED, Layout, attention_scale, float32, one, scalar, size
from kvc_trt.operators.softmax import PLAIN, SoftmaxForm, probabilities

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcPrefillAttention; M and S are multiples of PROMPT_BLOCK.

    Rows are padded on the right: the causal mask keeps padding away from every real token.
    """
    heads = emit.Concat([0], size(emit, "k", 1), [-1], size(emit, "q", 2), size(emit, "q", 3), axis=0)
    query = emit.Reshape(emit.Mul(float32(emit, "q"), attention_scale(emit, "q", 3)), heads)
    keys, values = float32(emit, "k"), float32(emit, "v")
    block_mask, sinks = future_of_block(emit), layout.softmax.grouped_sinks(emit, "k", 2)
    count = scalar(emit, emit.Div(size(emit, "q", 2), PROMPT_BLOCK))
    last = emit.Sub(count, 1)
    before = emit.Sub(size(emit, "k", 2), size(emit, "q", 2))

    def block(body: Emitter, iteration: Value) -> Value:
        given = block_mask, body.Sub(last, iteration), before, layout.softmax, sinks
        weights, rows, end = weights_of_block(body, query, keys, *given)
        matrix = body.Reshape(weights, body.Concat([0, 0, -1], end, axis=0))
        return str(body.Reshape(body.MatMul(matrix, body.Slice(values, [0], end, [2])), body.Shape(rows)))

    # The last block needs most memory and comes first, so that the others reuse its memory. In ascending order an
    # allocator would keep the temporaries of every block, whose sum grows with the square of the length.
    blocks = emit.Slice(emit.collect(count, block), [-1], [np.iinfo(np.int64).min], [0], [-1])
    in_order = emit.Transpose(blocks, perm=[1, 2, 3, 0, 4, 5])
    return {"o": emit.CastLike(emit.Reshape(in_order, emit.Shape("q")), "q")}


def future_of_block(emit: Emitter) -> Value:
    """Return FLOAT [block, block]: MASKED where a key of the block comes after the query, else 0."""
    offsets = emit.Range(0, PROMPT_BLOCK, 1)
    return str(emit.Where(emit.Greater(offsets, emit.Unsqueeze(offsets, [1])), MASKED, 0.0))


def weights_of_block(
    emit: Emitter, query: Value, keys: Value, block_mask: Value, index: Value, before: Value | None = None,
    softmax: SoftmaxForm = PLAIN, sinks: Value | None = None,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """Return the attention [B,G,g,block,end] of block `index` of `query` [B,G,g,M,D] to all keys up to its end.

    Also return the block's queries [B,G,g,block,D] and its end, INT64 [1]. `before`, INT64 [1], is the number of keys
    before the first query; None for none. `sinks` are FLOAT [G,g,1,1], where the softmax has some.
    """
    first = one(emit, emit.Mul(index, PROMPT_BLOCK))
    rows = emit.Slice(query, first, emit.Add(first, PROMPT_BLOCK), [3])
    start = first if before is None else emit.Add(first, before)
    end = emit.Add(start, PROMPT_BLOCK)
    matrix = emit.Reshape(rows, emit.Concat([0, 0, -1], size(emit, query, 4), axis=0))
    scores = emit.MatMul(matrix, emit.Transpose(emit.Slice(keys, [0], end, [2]), perm=[0, 1, 3, 2]))
    mask = emit.Pad(block_mask, emit.Concat([0], start, [0, 0], axis=0), 0.0)
    grouped = emit.Reshape(scores, emit.Concat(emit.Shape(rows, end=-1), [-1], axis=0))
    by_head = emit.Add(softmax.capped(emit, grouped), mask)
    return probabilities(emit, by_head, sinks), rows, end


PREFILL_ATTENTION = Operator(
    name="KvcPrefillAttention",
    summary="Exact causal attention over the prompt, in memory linear in its length.",
    inputs=(
        Tensor("q", CACHE, ("B", "H", "M", "D"), "after RoPE, of the last M tokens"),
        Tensor("k", CACHE, ("B", "G", "S", "D"), "after RoPE"),
        Tensor("v", CACHE, ("B", "G", "S", "D")),
    ),
    outputs=(Tensor("o", CACHE, ("B", "H", "M", "D")),),
    write=_write,
    attends=True,
)
