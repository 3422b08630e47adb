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
from kvc_trt.graph.functions.append import append, raise_bounds, slot_indices
from kvc_trt.graph.functions.attend import GroupedQuery, attend, attend_first, group_query, ungroup
from kvc_trt.graph.functions.shapes import MASKED, count_to, float32, int32, one, size

NAME = "KvcHybridAttention"
INPUTS = ("query", "k_new", "v_new", "k_cache", "v_cache", "bounds", "cache_lengths")
ATTRIBUTES = ("page_size", "top_r", "top_k", "token_budget", "dense_until")
LAST_INDEX = np.int64(2**31 - 1)


@dataclass(frozen=True)
class Step:
    """What both ways to attend need, after the append."""

    query: GroupedQuery
    keys: Value
    values: Value
    bounds: Value
    lengths: Value
    """[B,1,1,1], the new entry included."""
    longest: Value
    """Scalar: the longest row."""
    limit: Value
    """Scalar: rows up to this length attend to all their entries."""


def hybrid_attention() -> FunctionProto:
    """(query [B,H,D], k_new, v_new [B,G,D], k_cache, v_cache [B,G,C,D], bounds [B,G,2D,P], cache_lengths [B]) ->
    (output [B,H,D], k_cache, v_cache, bounds, selected INT32 [B,G,max(top_k, token_budget, dense_until)]).

    A row with at most max(token_budget, dense_until) entries attends to all of them. When all rows of the batch are
    that short, the code of KvcDenseAttention runs, on the same slice.
    """
    emit = Emitter()
    step = _append(emit)

    def dense(branch: Emitter) -> list[Value]:
        attended = attend_first(branch, step.query, step.keys, step.values, step.lengths, step.longest)
        return [attended, _every_entry(branch, step)]

    def sparse(branch: Emitter) -> list[Value]:
        return list(_select_and_attend(branch, step))

    fits = emit.LessOrEqual(step.longest, step.limit)
    attended, walked = emit.choose(fits, dense, sparse, outputs=2)
    output = ungroup(emit, attended, "query")
    selected = _ascending(emit, walked, emit.Max(step.limit, emit.attribute("top_k")))
    caches = {"k_cache_out": step.keys, "v_cache_out": step.values, "bounds_out": step.bounds}
    outputs = {"output": output, **caches, "selected": selected}
    return function(NAME, INPUTS, outputs, ATTRIBUTES, emit)


def _append(emit: Emitter) -> Step:
    indices = slot_indices(emit, "cache_lengths", "k_cache")
    keys = append(emit, "k_cache", indices, "k_new")
    values = append(emit, "v_cache", indices, "v_new")
    slots = emit.Reshape("cache_lengths", [-1, 1, 1, 1])
    bounds = raise_bounds(emit, "bounds", emit.Div(slots, emit.attribute("page_size")), "k_new")
    lengths = emit.Add(slots, 1)
    limit = emit.Max(emit.attribute("token_budget"), emit.attribute("dense_until"))
    query = group_query(emit, "query", keys)
    return Step(query, keys, values, bounds, lengths, emit.ReduceMax(lengths, keepdims=0), limit)


def _every_entry(emit: Emitter, step: Step) -> Value:
    """INT64 [B,G,longest]: 0..m-1 and -1 past a row's end."""
    slots = emit.Range(0, step.longest, 1)
    kept = emit.Where(emit.Less(slots, emit.Squeeze(step.lengths, [3])), slots, -1)
    heads = emit.Concat([1], size(emit, step.keys, 1), [1], axis=0)
    return str(emit.Expand(kept, heads))


def _select_and_attend(emit: Emitter, step: Step) -> tuple[Value, Value]:
    """Steps 3 to 10 of the rule; -> (attended [B,G,g,D], tokens INT64 [B,G,T] in walk order, -1 where not taken)."""
    rows = emit.Squeeze(step.lengths, [3])
    in_page = _tokens_in_page(emit, rows, _page_starts(emit, size(emit, step.bounds, 3)))
    score = _page_scores(emit, step, in_page)
    taken, tokens = _walk_pages(emit, step, score, rows)
    last = emit.Sub(size(emit, step.keys, 2), 1)
    where = emit.Unsqueeze(emit.Min(tokens, last), [3])
    keys, values = (emit.GatherND(cache, where, batch_dims=2) for cache in (step.keys, step.values))
    attended = attend(emit, step.query, keys, values, emit.Unsqueeze(taken, [2]))
    return attended, emit.Where(taken, tokens, -1)


def _page_starts(emit: Emitter, pages: Value) -> Value:
    return str(emit.Mul(count_to(emit, pages), emit.attribute("page_size")))


def _tokens_in_page(emit: Emitter, rows: Value, starts: Value) -> Value:
    """Entries of rows of length `rows` [B,1,1] in the pages that begin at `starts`; INT64."""
    return str(emit.Clip(emit.Sub(rows, starts), 0, emit.attribute("page_size")))


def _page_scores(emit: Emitter, step: Step, in_page: Value) -> Value:
    """Group score of one token of each page, FLOAT [B,G,P] (steps 3 to 7), up to the factor 1/g.

    The softmax runs over pages and is normalised by tokens: pages with equal scores stay equal whatever their fill.
    """
    query = step.query.plain
    magnitude = emit.Abs(query)
    _, channels = emit.TopK(
        emit.ReduceSum(magnitude, [2], keepdims=0), one(emit, emit.attribute("top_r")), outputs=2, axis=2
    )
    rising = emit.Greater(emit.GatherElements(emit.ReduceSum(query, [2], keepdims=0), channels, axis=2), 0.0)
    row = emit.Add(channels, emit.Where(rising, 0, size(emit, query, 3)))
    bound = float32(emit, emit.GatherND(step.bounds, emit.Unsqueeze(row, [3]), batch_dims=2))
    part = _query_channels(emit, query, channels)
    sign = emit.Unsqueeze(emit.Where(rising, 1.0, -1.0), [2])
    signed = emit.Mul(emit.Div(part, _temperature(emit, magnitude, part)), sign)
    count = emit.Unsqueeze(float32(emit, in_page), [2])
    estimate = emit.Where(emit.Greater(count, 0.0), emit.MatMul(signed, bound), MASKED)
    weight = emit.Softmax(estimate, axis=-1)
    total = emit.MatMul(weight, emit.Transpose(count, perm=[0, 1, 3, 2]))
    group = emit.MatMul(emit.Transpose(emit.Reciprocal(total), perm=[0, 1, 3, 2]), weight)
    score = emit.Squeeze(group, [2])
    # NaN ranks below every number; empty pages score 0, or -1 among NaN, and come last in both ties.
    return str(emit.Where(emit.GreaterOrEqual(score, 0.0), score, -1.0))


def _query_channels(emit: Emitter, query: Value, channels: Value) -> Value:
    """`query` [B,G,g,D] at `channels` [B,G,r] -> [B,G,g,r]."""
    by_channel = emit.Transpose(query, perm=[0, 1, 3, 2])
    picked = emit.GatherND(by_channel, emit.Unsqueeze(channels, [3]), batch_dims=2)
    return str(emit.Transpose(picked, perm=[0, 1, 3, 2]))


def _temperature(emit: Emitter, magnitude: Value, part: Value) -> Value:
    """sqrt(D * covered share of |q|) per head, sqrt(D) where nothing is covered; [B,G,g,1]."""
    covered = emit.ReduceSum(emit.Abs(part), [3])
    share = emit.Div(covered, emit.ReduceSum(magnitude, [3]))
    share = emit.Where(emit.Greater(covered, 0.0), share, 1.0)
    return str(emit.Sqrt(emit.Mul(share, float32(emit, size(emit, magnitude, 3)))))


def _walk_pages(emit: Emitter, step: Step, score: Value, rows: Value) -> tuple[Value, Value]:
    """Whole pages by (score descending, page ascending), the last one cut to its lowest tokens (step 8).

    -> (taken BOOL, tokens INT64), both [B,G,T]; one page more than needed is walked, the partial one may be among them.
    """
    page_size = emit.attribute("page_size")
    wanted = emit.Where(emit.LessOrEqual(rows, step.limit), rows, emit.Min(rows, emit.attribute("top_k")))
    most = emit.ReduceMax(wanted, keepdims=0)
    whole = emit.Div(emit.Sub(emit.Add(most, emit.Mul(page_size, 2)), 1), page_size)
    pages = emit.Min(one(emit, whole), size(emit, step.bounds, 3))
    _, walk = emit.TopK(score, pages, outputs=2, axis=2)
    starts = emit.Mul(walk, page_size)
    in_page = _tokens_in_page(emit, rows, starts)
    before = emit.CumSum(in_page, 2, exclusive=1)
    quota = emit.Min(in_page, emit.Sub(wanted, before))
    offsets = emit.Range(0, page_size, 1)
    taken = emit.Less(offsets, emit.Unsqueeze(quota, [3]))
    tokens = emit.Add(emit.Unsqueeze(starts, [3]), offsets)
    return emit.Reshape(taken, [0, 0, -1]), emit.Reshape(tokens, [0, 0, -1])


def _ascending(emit: Emitter, tokens: Value, width: Value) -> Value:
    """`tokens` INT64 [B,G,T] with -1 for none -> INT32 [B,G,width] ascending, -1 past the end.

    Written outside of the branches: executors drop it where `selected` is not used.
    """
    width = one(emit, width)
    gaps = emit.Where(emit.Less(tokens, 0), LAST_INDEX, tokens)
    listed, _ = emit.TopK(gaps, emit.Min(width, size(emit, tokens, 2)), outputs=2, axis=2, largest=0)
    missing = emit.Sub(width, size(emit, listed, 2))
    padded = emit.Pad(listed, emit.Concat([0, 0, 0, 0, 0], missing, axis=0), LAST_INDEX)
    return int32(emit, emit.Where(emit.Equal(padded, LAST_INDEX), -1, padded))
