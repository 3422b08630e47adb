"""KvcSlidingAttention: exact attention over a prompt in a layer where each token sees the last ones alone.

One iteration per block of queries, over the keys that some query of the block sees: time and memory are linear in the
prompt's length. As in KvcPrefillAttention, the queries are those of the last M tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.schema import Attribute, Operator
from kvc_trt.operators.shapes import MASKED, Layout, attention_scale, count_to, float32, one, scalar, size
from kvc_trt.operators.softmax import SoftmaxForm, probabilities

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcSlidingAttention; M and S are multiples of PROMPT_BLOCK."""
    heads = emit.Concat([0], size(emit, "k", 1), [-1], size(emit, "q", 2), size(emit, "q", 3), axis=0)
    query = emit.Reshape(emit.Mul(float32(emit, "q"), attention_scale(emit, "q", 3)), heads)
    keys, values = float32(emit, "k"), float32(emit, "v")
    count = scalar(emit, emit.Div(size(emit, "q", 2), PROMPT_BLOCK))
    before = emit.Sub(size(emit, "k", 2), size(emit, "q", 2))
    sinks = layout.softmax.grouped_sinks(emit, "k", 2)

    def block(body: Emitter, iteration: Value) -> Value:
        return _attend_block(body, query, (keys, values), iteration, before, layout.softmax, sinks)

    in_order = emit.Transpose(emit.collect(count, block), perm=[1, 2, 3, 0, 4, 5])
    return {"o": emit.CastLike(emit.Reshape(in_order, emit.Shape("q")), "q")}


def _attend_block(
    emit: Emitter, query: Value, tables: tuple[Value, Value], index: Value, before: Value, softmax: SoftmaxForm,
    sinks: Value | None,
) -> Value:  # fmt: skip
    """Attend from block `index` of `query` [B,G,g,M,D], behind `before` [1] other tokens: [B,G,g,block,D].

    `tables` are keys and values [B,G,S,D], `sinks` FLOAT [G,g,1,1], where the softmax has some."""
    window, first = emit.attribute("window"), one(emit, emit.Mul(index, PROMPT_BLOCK))
    rows = emit.Slice(query, first, emit.Add(first, PROMPT_BLOCK), [3])
    start = emit.Add(first, before)
    end = emit.Add(start, PROMPT_BLOCK)
    oldest = emit.Max(emit.Sub(emit.Add(start, 1), window), [0])
    seen_keys, seen_values = (emit.Slice(table, oldest, end, [2]) for table in tables)
    matrix = emit.Reshape(rows, emit.Concat([0, 0, -1], size(emit, query, 4), axis=0))
    scores = emit.MatMul(matrix, emit.Transpose(seen_keys, perm=[0, 1, 3, 2]))
    by_head = emit.Reshape(scores, emit.Concat(emit.Shape(rows, end=-1), [-1], axis=0))
    places = emit.Add(count_to(emit, emit.Sub(end, oldest)), oldest)
    age = emit.Sub(emit.Unsqueeze(emit.Add(emit.Range(0, PROMPT_BLOCK, 1), start), [1]), places)
    hidden = emit.Or(emit.Less(age, 0), emit.GreaterOrEqual(age, window))
    weights = probabilities(emit, emit.Where(hidden, MASKED, softmax.capped(emit, by_head)), sinks)
    flat = emit.Reshape(weights, emit.Concat([0, 0, -1], emit.Sub(end, oldest), axis=0))
    return str(emit.Reshape(emit.MatMul(flat, seen_values), emit.Shape(rows)))


SLIDING_ATTENTION = Operator(
    name="KvcSlidingAttention",
    summary="Exact attention over the prompt in which each token sees the last ones alone.",
    inputs=PREFILL_ATTENTION.inputs,
    outputs=PREFILL_ATTENTION.outputs,
    attributes=(Attribute("window", summary="tokens that a token sees, itself included"),),
    write=_write,
    attends=True,
    native=False,
)
OVER_PROMPT = frozenset((PREFILL_ATTENTION.name, SLIDING_ATTENTION.name))
"""The operators that attend from a prompt's tokens to each other."""
