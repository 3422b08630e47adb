"""KvcHybridAttention: append one token, select the pages that matter, attend to their tokens (RocketKV, stage 2).

Source: RocketKV (arXiv 2502.14051), section 3.3; exact rule in docs/policies/. Bounds are kept channel-major,
[B,G,2D,P], as page maxima of K and of -K: one product with the signed query reads only the selected channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.attention.attend import attend
from kvc_trt.operators.attention.selective import (
    AppendedStep,
    append,
    ascending,
    attend_all_or,
    largest_channels,
    temperature,
)
from kvc_trt.operators.dimensions import MAX_HEAD_SIZE
from kvc_trt.operators.fp8_bounds import write_values
from kvc_trt.operators.schema import INT32, Attribute, Kernel, Operator, Tensor
from kvc_trt.operators.shapes import MASKED, Layout, count_to, float32, scalar, size
from kvc_trt.operators.softmax import weights_and_total
from kvc_trt.operators.tensors import (
    BOUNDS,
    CACHE_LENGTHS,
    DENSE_UNTIL,
    FP8_BOUNDS,
    K_CACHE,
    OUTPUT,
    PAGE_SIZE,
    READ_ALWAYS,
    STEP,
    TOKEN_BUDGET,
    TOP_K,
    V_CACHE,
    updated,
)

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcHybridAttention.

    A row with at most max(token_budget, dense_until) entries attends to all of them. If all rows of the batch are that
    short, the code of KvcDenseAttention runs on the same slice. A longer row reads its last `recent` entries, and the
    best of the others.
    """
    place, step = append(emit, layout)
    page = emit.Div(place.slots, emit.attribute("page_size"))
    bounds = place.raise_bounds("bounds", step.new.keys.read(emit), page, layout)

    def sparse(branch: Emitter) -> list[Value]:
        return _select_and_attend(branch, step, bounds)

    output, walked = attend_all_or(emit, step, sparse, lists=layout.shape.fixed_kv_heads)
    selected = ascending(emit, walked, emit.Max(step.limit, emit.attribute("top_k")))
    return {"output": output, **step.caches(), "bounds_out": bounds, "selected": selected}


def _select_and_attend(emit: Emitter, step: AppendedStep, bounds: Value) -> list[Value]:
    """Steps 3 to 10 of the rule; -> [attended [B,G,g,D], tokens INT64 [B,G,T] by page rank, -1 where not taken]."""
    score = _page_scores(emit, step, bounds)
    taken, tokens = _walk_pages(emit, step, score)
    taken, tokens = _with_recent(emit, step, taken, tokens)
    keys, values = step.gather(emit, step.rows(emit, tokens))
    attended = attend(emit, step.query, keys, values, taken)
    return [attended, emit.Where(emit.Squeeze(taken, [2]), tokens, -1)]


def _page_scores(emit: Emitter, step: AppendedStep, bounds: Value) -> Value:
    """Group score of one token of each page, FLOAT [B,G,1,P] (steps 3 to 7), up to the factor 1/g.

    A cap of logits is monotone, so that of a bound is a bound of capped logits.

    The softmax runs over pages and is normalised by tokens, so pages with equal scores stay equal however full.
    """
    query, head_size = step.query.plain, step.layout.shape.head_size
    channels = largest_channels(emit, query)
    rising = emit.Greater(emit.GatherElements(emit.ReduceSum(query, [2], keepdims=0), channels, axis=2), 0.0)
    row = emit.Unsqueeze(emit.Where(rising, channels, emit.Add(channels, head_size)), [3])
    chosen = emit.GatherND(bounds, row, batch_dims=2)
    bound = write_values(emit, chosen) if step.layout.fp8_bounds else float32(emit, chosen)
    both_signs = emit.Transpose(emit.Concat(query, emit.Neg(query), axis=3), perm=[0, 1, 3, 2])
    signed = emit.Transpose(emit.GatherND(both_signs, row, batch_dims=2), perm=[0, 1, 3, 2])
    tempered = emit.Div(signed, temperature(emit, query, signed, head_size))
    count = _tokens_in_every_page(emit, step, bounds)
    bounded = step.query.softmax.capped(emit, emit.MatMul(tempered, bound))
    estimate = emit.Where(emit.Greater(count, 0.0), bounded, MASKED)
    by_page = emit.Transpose(count, perm=[0, 1, 3, 2])
    if step.query.sinks is None:
        weight = emit.Softmax(estimate, axis=-1)
        total = emit.MatMul(weight, by_page)
    else:
        weight, own = weights_and_total(emit, estimate, step.query.sinks)
        total = emit.Add(emit.MatMul(weight, by_page), own)
    score = emit.MatMul(emit.Transpose(emit.Reciprocal(total), perm=[0, 1, 3, 2]), weight)
    # NaN ranks below every number. Empty pages score 0 (-1 beside NaN) and come last among equals in both cases.
    return str(emit.Where(emit.GreaterOrEqual(score, 0.0), score, -1.0))


def _tokens_in_every_page(emit: Emitter, step: AppendedStep, bounds: Value) -> Value:
    """Return the number of entries in each page, FLOAT [B,1,1,P]."""
    page_size = float32(emit, emit.attribute("page_size"))
    if step.layout.pages is None:
        numbers = float32(emit, count_to(emit, size(emit, bounds, 3)))
    else:
        numbers = emit.constant(np.arange(step.layout.pages, dtype=np.float32))
    starts = emit.Mul(numbers, page_size)
    return str(emit.Clip(emit.Sub(float32(emit, step.lengths), starts), 0.0, page_size))


def _walk_pages(emit: Emitter, step: AppendedStep, score: Value) -> tuple[Value, Value]:
    """Take whole pages by (score descending, page ascending), the last one cut to its lowest tokens (step 8).

    -> (taken BOOL [B,G,1,T], tokens INT64 [B,G,T]). The last `recent` tokens of a sparse row do not compete, and its
    other tokens are chosen as if they had places of their own. One page more than needed is visited, since one may be
    partial, and as many as have nothing but tokens that do not compete.
    """
    page_size, recent = emit.attribute("page_size"), emit.attribute("recent")
    whole = _reads_all(emit, step)
    lengths = emit.Where(whole, step.lengths, emit.Sub(step.lengths, recent))
    wanted = emit.Where(whole, step.lengths, emit.Sub(emit.attribute("top_k"), recent))
    rounding = emit.Sub(emit.Mul(page_size, 2), 1)
    pages = emit.Div(emit.Add(emit.ReduceMax(wanted, [0, 1, 2], keepdims=0), rounding), page_size)
    pages = emit.Add(pages, emit.Div(emit.Sub(emit.Add(recent, page_size), 1), page_size))
    all_pages = scalar(emit, size(emit, score, 3)) if step.layout.pages is None else step.layout.pages
    _, walk = emit.TopK(score, emit.Min(pages, all_pages), outputs=2, axis=3)
    starts = emit.Mul(walk, page_size)
    in_page = emit.Clip(emit.Sub(lengths, starts), 0, page_size)
    quota = emit.Min(in_page, emit.Sub(wanted, emit.CumSum(in_page, 3, exclusive=1)))
    offsets = emit.Range(0, page_size, 1)
    taken = emit.Less(offsets, emit.Reshape(quota, [0, 0, -1, 1]))
    tokens = emit.Add(emit.Reshape(starts, [0, 0, -1, 1]), offsets)
    return emit.Reshape(taken, [0, 0, 1, -1]), emit.Reshape(tokens, [0, 0, -1])


def _with_recent(emit: Emitter, step: AppendedStep, taken: Value, tokens: Value) -> tuple[Value, Value]:
    """Append the last `recent` tokens of sparse rows to `taken` [B,G,1,T] and `tokens` [B,G,T]."""
    kv_heads = step.layout.shape.fixed_kv_heads
    back = emit.Range(emit.Neg(emit.attribute("recent")), 0, 1)
    last = emit.Max(emit.Add(emit.Squeeze(step.lengths, [3]), back), 0)
    own = emit.And(emit.Not(_reads_all(emit, step)), emit.GreaterOrEqual(emit.Unsqueeze(last, [2]), 0))
    return (
        str(emit.Concat(taken, emit.Expand(own, [1, kv_heads, 1, 1]), axis=3)),
        str(emit.Concat(tokens, emit.Expand(last, [1, kv_heads, 1]), axis=2)),
    )


def _reads_all(emit: Emitter, step: AppendedStep) -> Value:
    """Tell which rows read all their entries, BOOL [B,1,1,1]."""
    return str(emit.LessOrEqual(step.lengths, emit.Max(step.limit, emit.attribute("top_k"))))


HYBRID_ATTENTION = Operator(
    name="KvcHybridAttention",
    summary="Append one token, select the pages that matter, attend to their tokens.",
    inputs=(*STEP, BOUNDS, CACHE_LENGTHS),
    outputs=(
        OUTPUT,
        updated(K_CACHE),
        updated(V_CACHE),
        updated(BOUNDS),
        Tensor("selected", INT32, ("B", "G", "K"), "slots read, ascending, -1 past the end", optional=True),
    ),
    attributes=(
        PAGE_SIZE,
        Attribute("top_r", 1, MAX_HEAD_SIZE, "channels that score pages", bits=32, at_most="D"),
        TOP_K,
        TOKEN_BUDGET,
        DENSE_UNTIL,
        FP8_BOUNDS,
        READ_ALWAYS,
    ),
    formulas={"K": "max(top_k, token_budget, dense_until)"},
    write=_write,
    attends=True,
    stores=True,
    kernel=Kernel("kvc_hybrid_attention", "KvcHybridAttentionParams", later=(READ_ALWAYS.name,)),
)
