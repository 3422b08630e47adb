"""KvcHybridAttention: append one token, select the pages that matter, attend to their tokens (RocketKV, stage 2).

Source: RocketKV (arXiv 2502.14051), section 3.3; exact rule in docs/policies/. Bounds are kept channel-major,
[B,G,2D,P], as page maxima of K and of -K: one product with the signed query reads only the selected channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import FunctionProto

from kvc_trt.graph.emitter import Emitter, Value
from kvc_trt.graph.functions import function
from kvc_trt.graph.functions.append import Place
from kvc_trt.graph.functions.attend import GroupedQuery, attend, attend_first, group_query, ungroup
from kvc_trt.graph.functions.shapes import MASKED, HeadShape, count_to, float32, int32, one, scalar, size

NAME = "KvcHybridAttention"
INPUTS = ("query", "k_new", "v_new", "k_cache", "v_cache", "bounds", "cache_lengths")
ATTRIBUTES = ("page_size", "top_r", "top_k", "token_budget", "dense_until")
LAST_INDEX = np.int64(2**31 - 1)


@dataclass(frozen=True)
class Layout:
    """Numbers of one engine that the body contains; None where layers differ, and the body asks its inputs."""

    shape: HeadShape
    capacity: int | None
    pages: int | None
    dtype: str
    """Type of the cache."""


@dataclass(frozen=True)
class Step:
    """What both ways to attend need, after the append."""

    layout: Layout
    query: GroupedQuery
    keys: Value
    values: Value
    bounds: Value
    key_rows: Value
    """`keys` as [B*G*C,D]: rows gathered by one index each cost less than by index tuples."""
    value_rows: Value
    first_row: Value
    """INT64 [B,G,1]: row of each head's slot 0 in `key_rows` and `value_rows`."""
    lengths: Value
    """[B,1,1,1], the new entry included."""
    longest: Value
    """Scalar: the longest row."""
    limit: Value
    """Scalar: rows up to this length attend to all their entries."""


def hybrid_attention(layout: Layout) -> FunctionProto:
    """(query [B,H,D], k_new, v_new [B,G,D], k_cache, v_cache [B,G,C,D], bounds [B,G,2D,P], cache_lengths [B]) ->
    (output [B,H,D], k_cache, v_cache, bounds, selected INT32 [B,G,max(top_k, token_budget, dense_until)]).

    A row with at most max(token_budget, dense_until) entries attends to all of them. When all rows of the batch are
    that short, the code of KvcDenseAttention runs, on the same slice.
    """
    emit = Emitter()
    step = _append(emit, layout)

    def dense(branch: Emitter) -> list[Value]:
        attended = attend_first(branch, step.query, step.keys, step.values, step.lengths, step.longest)
        return [attended, _every_entry(branch, step)]

    def sparse(branch: Emitter) -> list[Value]:
        return list(_select_and_attend(branch, step))

    fits = emit.LessOrEqual(step.longest, step.limit)
    attended, walked = emit.choose(fits, dense, sparse, outputs=2)
    output = ungroup(emit, attended, "query", layout.shape)
    selected = _ascending(emit, walked, emit.Max(step.limit, emit.attribute("top_k")))
    caches = {"k_cache_out": step.keys, "v_cache_out": step.values, "bounds_out": step.bounds}
    outputs = {"output": output, **caches, "selected": selected}
    return function(NAME, INPUTS, outputs, ATTRIBUTES, emit)


def _append(emit: Emitter, layout: Layout) -> Step:
    place = Place(emit, "cache_lengths", layout.shape)
    keys, values = place.append("k_cache", "k_new"), place.append("v_cache", "v_new")
    page = emit.Div(place.slots, emit.attribute("page_size"))
    bounds = place.raise_bounds("bounds", "k_new", page, layout.dtype)
    lengths = emit.Add(place.slots, 1)
    limit = emit.Max(emit.attribute("token_budget"), emit.attribute("dense_until"))
    query = group_query(emit, "query", layout.shape)
    # Outside of the branches, where ONNX Runtime is known to reshape in place.
    key_rows, value_rows = (emit.Reshape(cache, [-1, layout.shape.head_size]) for cache in (keys, values))
    first_row, longest = place.first_rows(_capacity(emit, layout)), emit.ReduceMax(lengths, keepdims=0)
    return Step(layout, query, keys, values, bounds, key_rows, value_rows, first_row, lengths, longest, limit)


def _capacity(emit: Emitter, layout: Layout) -> int | Value:
    return size(emit, "k_cache", 2) if layout.capacity is None else layout.capacity


def _every_entry(emit: Emitter, step: Step) -> Value:
    """INT64 [B,G,longest]: 0..m-1 and -1 past a row's end."""
    slots = emit.Range(0, step.longest, 1)
    kept = emit.Where(emit.Less(slots, emit.Squeeze(step.lengths, [3])), slots, -1)
    return str(emit.Expand(kept, [1, step.layout.shape.fixed_kv_heads, 1]))


def _select_and_attend(emit: Emitter, step: Step) -> tuple[Value, Value]:
    """Steps 3 to 10 of the rule; -> (attended [B,G,g,D], tokens INT64 [B,G,T] in walk order, -1 where not taken)."""
    score = _page_scores(emit, step)
    taken, tokens = _walk_pages(emit, step, score)
    capacity = _capacity(emit, step.layout)
    last = [capacity - 1] if isinstance(capacity, int) else emit.Sub(capacity, 1)
    rows = emit.Add(emit.Min(tokens, last), step.first_row)
    keys, values = (emit.Gather(cache, rows) for cache in (step.key_rows, step.value_rows))
    attended = attend(emit, step.query, keys, values, taken)
    walked = emit.Where(emit.Squeeze(taken, [2]), tokens, -1)
    return attended, walked


def _page_scores(emit: Emitter, step: Step) -> Value:
    """Group score of one token of each page, FLOAT [B,G,1,P] (steps 3 to 7), up to the factor 1/g.

    The softmax runs over pages and is normalised by tokens: pages with equal scores stay equal whatever their fill.
    """
    query, head_size = step.query.plain, step.layout.shape.head_size
    channel_sums = emit.ReduceL1(query, [2], keepdims=0)
    _, channels = emit.TopK(channel_sums, one(emit, emit.attribute("top_r")), outputs=2, axis=2, sorted=0)
    rising = emit.Greater(emit.GatherElements(emit.ReduceSum(query, [2], keepdims=0), channels, axis=2), 0.0)
    row = emit.Unsqueeze(emit.Where(rising, channels, emit.Add(channels, head_size)), [3])
    bound = float32(emit, emit.GatherND(step.bounds, row, batch_dims=2))
    both_signs = emit.Transpose(emit.Concat(query, emit.Neg(query), axis=3), perm=[0, 1, 3, 2])
    signed = emit.Transpose(emit.GatherND(both_signs, row, batch_dims=2), perm=[0, 1, 3, 2])
    tempered = emit.Div(signed, _temperature(emit, query, signed, head_size))
    count = _tokens_in_every_page(emit, step)
    estimate = emit.Where(emit.Greater(count, 0.0), emit.MatMul(tempered, bound), MASKED)
    weight = emit.Softmax(estimate, axis=-1)
    total = emit.MatMul(weight, emit.Transpose(count, perm=[0, 1, 3, 2]))
    score = emit.MatMul(emit.Transpose(emit.Reciprocal(total), perm=[0, 1, 3, 2]), weight)
    # NaN ranks below every number; empty pages score 0, or -1 among NaN, and come last in both ties.
    return str(emit.Where(emit.GreaterOrEqual(score, 0.0), score, -1.0))


def _tokens_in_every_page(emit: Emitter, step: Step) -> Value:
    """Entries in each page, FLOAT [B,1,1,P]."""
    page_size = float32(emit, emit.attribute("page_size"))
    if step.layout.pages is None:
        numbers = float32(emit, count_to(emit, size(emit, step.bounds, 3)))
    else:
        numbers = emit.constant(np.arange(step.layout.pages, dtype=np.float32))
    starts = emit.Mul(numbers, page_size)
    return str(emit.Clip(emit.Sub(float32(emit, step.lengths), starts), 0.0, page_size))


def _temperature(emit: Emitter, query: Value, selected: Value, head_size: int) -> Value:
    """sqrt(D * covered share of |q|) per head, sqrt(D) where nothing is covered; [B,G,g,1]."""
    covered = emit.ReduceL1(selected, [3])
    share = emit.Div(covered, emit.ReduceL1(query, [3]))
    share = emit.Where(emit.Greater(covered, 0.0), share, 1.0)
    return str(emit.Sqrt(emit.Mul(share, float(head_size))))


def _walk_pages(emit: Emitter, step: Step, score: Value) -> tuple[Value, Value]:
    """Whole pages by (score descending, page ascending), the last one cut to its lowest tokens (step 8).

    -> (taken BOOL [B,G,1,T], tokens INT64 [B,G,T]); one page more than needed is walked, for the partial one may be
    among them.
    """
    page_size, lengths = emit.attribute("page_size"), step.lengths
    chosen = emit.Min(lengths, emit.attribute("top_k"))
    wanted = emit.Where(emit.LessOrEqual(lengths, step.limit), lengths, chosen)
    rounding = emit.Sub(emit.Mul(page_size, 2), 1)
    pages = emit.Div(emit.Add(emit.ReduceMax(wanted, [0, 1, 2], keepdims=0), rounding), page_size)
    all_pages = scalar(emit, size(emit, score, 3)) if step.layout.pages is None else step.layout.pages
    _, walk = emit.TopK(score, emit.Min(pages, all_pages), outputs=2, axis=3)
    starts = emit.Mul(walk, page_size)
    in_page = emit.Clip(emit.Sub(lengths, starts), 0, page_size)
    quota = emit.Min(in_page, emit.Sub(wanted, emit.CumSum(in_page, 3, exclusive=1)))
    offsets = emit.Range(0, page_size, 1)
    taken = emit.Less(offsets, emit.Reshape(quota, [0, 0, -1, 1]))
    tokens = emit.Add(emit.Reshape(starts, [0, 0, -1, 1]), offsets)
    return emit.Reshape(taken, [0, 0, 1, -1]), emit.Reshape(tokens, [0, 0, -1])


def _ascending(emit: Emitter, tokens: Value, width: Value) -> Value:
    """`tokens` INT64 [B,G,T] with -1 for none -> INT32 [B,G,width] ascending, -1 past the end.

    Written outside of the branches: `prune` drops it where `selected` is not used.
    """
    width = one(emit, width)
    gaps = emit.Where(emit.Less(tokens, 0), LAST_INDEX, tokens)
    listed, _ = emit.TopK(gaps, emit.Min(width, size(emit, tokens, 2)), outputs=2, axis=2, largest=0)
    missing = emit.Sub(width, size(emit, listed, 2))
    padded = emit.Pad(listed, emit.Concat([0, 0, 0, 0, 0], missing, axis=0), LAST_INDEX)
    return int32(emit, emit.Where(emit.Equal(padded, LAST_INDEX), -1, padded))
