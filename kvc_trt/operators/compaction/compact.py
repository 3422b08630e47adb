"""KvcCompact: keep the part of a prompt's cache that its last queries attend to (RocketKV, stage 1: SnapKV++).

Source: RocketKV (arXiv 2502.14051), section 3.2, after SnapKV (arXiv 2404.14469); exact rule in docs/policies/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.compaction.keep_best import keep_best
from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.fp8_bounds import write_codes
from kvc_trt.operators.schema import INT64, Attribute, Kernel, Operator, Stride, Tensor
from kvc_trt.operators.shapes import (
    MASKED,
    Layout,
    attention_scale,
    bounds_of_read,
    count_to,
    float32,
    one,
    scalar,
    size,
)
from kvc_trt.operators.softmax import PLAIN, SoftmaxForm, probabilities
from kvc_trt.operators.tensors import (
    BOUNDS,
    CAPACITY,
    FP8_BOUNDS,
    INDICES,
    K_CACHE,
    PAGE_SIZE,
    PROMPT_KEYS,
    PROMPT_LENGTHS,
    PROMPT_VALUES,
    STORED_LENGTHS,
    V_CACHE,
    WINDOW,
)
from kvc_trt.operators.vectors import EXACT, Tables, Vectors, stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

NOT_A_NUMBER, PADDING = -1.0, -2.0
"""Ranks below every score (scores are sums of probabilities)."""
PROTECTED = np.float32(3e38)
Pool = Callable[["Emitter", "Value", int], "Value"]

STORED_KEYS = replace(
    PROMPT_KEYS, summary="the stored tokens, then the new ones; after RoPE", stored="keys", parts_as="joined_k"
)
STORED_VALUES = replace(PROMPT_VALUES, summary="", stored="values", parts_as="joined_v")


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcCompact.

    Row i of q_window is the query at n-W+i. Rows with n <= prompt_budget keep everything; if all rows do, no score is
    computed. Two numbers cannot be attribute references in ONNX and are written into the body: `pool_kernel` (MaxPool
    takes a list) and `lowest`, the lowest finite number of the cache type, which marks empty pages.

    By length, each row has a budget and a pool kernel of its own: the nearest number of window..prompt_budget, and one
    of the engine's two kernels.
    """
    return _kept(emit, layout, EXACT)


def _write_average(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcCompactAverage: KvcCompact's, with sums in place of maxima."""
    return _kept(emit, layout, EXACT, pool=sum_pool)


def _write_turn(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcCompactTurn: KvcCompact over stored and new tokens, each row with its own window."""
    return _kept(emit, layout, stored_tables(layout, STORED_KEYS, STORED_VALUES), "window_lengths")


def _write_average_turn(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcCompactAverageTurn: KvcCompactTurn's, with sums in place of maxima."""
    return _kept(emit, layout, stored_tables(layout, STORED_KEYS, STORED_VALUES), "window_lengths", sum_pool)


def max_pool(emit: Emitter, observed: Value, kernel: int) -> Value:
    """Give each position of scores [B,G,S] the largest within the kernel around it."""
    reach = (kernel - 1) // 2
    return str(emit.MaxPool(observed, kernel_shape=[kernel], pads=[reach, reach]))


def sum_pool(emit: Emitter, observed: Value, kernel: int) -> Value:
    """Give each position of scores [B,G,S] the sum within the kernel around it, the lowest position first.

    Executors may choose the order of AveragePool's sums, and the last bits decide ties. Positions that are not ranked
    count 0."""
    reach, length = (kernel - 1) // 2, size(emit, observed, 2)
    votes = emit.Where(emit.Equal(observed, NOT_A_NUMBER), 0.0, observed)
    padded = emit.Pad(votes, [reach, reach], 0.0, [2])

    def add(body: Emitter, iteration: Value, total: Value) -> Value:
        start = body.Add(one(body, iteration), 1)
        return str(body.Add(total, body.Slice(padded, start, body.Add(start, length), [2])))

    return emit.accumulate(emit.constant(kernel - 1), emit.Slice(padded, [0], length, [2]), add)


def _kept(
    emit: Emitter, layout: Layout, tables: Tables, voting: Value | None = None, pool: Pool = max_pool
) -> dict[str, Value]:
    budgets = None
    if layout.by_length:
        window = size(emit, "q_window", 2) if voting is None else voting
        budgets = emit.Min(emit.Max("prompt_budgets", window), one(emit, emit.attribute("prompt_budget")))
    kept = keep_best(emit, layout, lambda branch: rank(branch, tables.keys, layout, voting, pool), tables, budgets)
    return {**kept.outputs, "bounds": page_bounds(emit, kept.keys, kept.stored, layout)}


def rank(emit: Emitter, keys: Vectors, layout: Layout, voting: Value | None = None, pool: Pool = max_pool) -> Value:
    """Return the rank of each position of `keys`, FLOAT [B,G,S] (steps 2 to 8); the window ranks highest.

    The last `voting` INT64 [B] rows of q_window are the window; None: all of them.
    """
    rows = emit.Reshape("prompt_lengths", [-1, 1, 1])
    columns = count_to(emit, size(emit, "k", 2))
    window = size(emit, "q_window", 2) if voting is None else emit.Reshape(voting, [-1, 1, 1])
    prefix = emit.Less(columns, emit.Sub(rows, window))
    observed = emit.Where(prefix, observed_attention(emit, keys, rows, columns, voting, layout.softmax), NOT_A_NUMBER)
    pooled = _pooled(emit, observed, layout, pool)
    score = emit.Where(emit.GreaterOrEqual(pooled, 0.0), pooled, NOT_A_NUMBER)
    return str(emit.Where(prefix, score, emit.Where(emit.Less(columns, rows), PROTECTED, PADDING)))


def _pooled(emit: Emitter, observed: Value, layout: Layout, pool: Pool) -> Value:
    """Pool scores [B,G,S] by the engine's kernel; rows below it by the short one, where the engine has two."""
    kernel, short = int(layout.number("pool_kernel")), int(layout.numbers.get("short_pool_kernel", 0))
    pooled = pool(emit, observed, kernel)
    if not (layout.by_length and short):
        return pooled
    is_short = emit.Less(emit.Reshape("pool_kernels", [-1, 1, 1]), kernel)
    return str(emit.Where(is_short, pool(emit, observed, short), pooled))


def observed_attention(
    emit: Emitter, keys: Vectors, rows: Value, columns: Value, voting: Value | None = None,
    softmax: SoftmaxForm = PLAIN,
) -> Value:  # fmt: skip
    """Return the attention of the window's queries to each key, summed over queries, then the group; FLOAT [B,G,S].

    Of each row of q_window the last `voting` INT64 [B] queries count; None: all. One KV head at a time: the scores of
    all heads of a 128K-token prompt would not fit in memory.
    """
    window = size(emit, "q_window", 2)
    silent = None
    if voting is not None:
        before = emit.Sub(window, emit.Reshape(voting, [-1, 1]))
        silent = emit.Unsqueeze(emit.Less(count_to(emit, window), before), [1, 3])
    last_visible = emit.Add(emit.Sub(rows, window), emit.Unsqueeze(count_to(emit, window), [1]))
    hidden = emit.Unsqueeze(emit.Greater(columns, last_visible), [1])
    by_group = emit.Concat([0], size(emit, "k", 1), [-1], size(emit, "q_window", 3), axis=0)
    query = emit.Reshape(emit.Mul(float32(emit, "q_window"), attention_scale(emit, "q_window", 3)), by_group)
    by_head = emit.Concat([0, -1], window, size(emit, "k", 2), axis=0)
    sinks = softmax.grouped_sinks(emit, "k", 2)

    def one_head(body: Emitter, head: Value) -> Value:
        own = keys.of_head(body, head)
        scores = body.MatMul(body.Gather(query, head, axis=1), body.Transpose(own, perm=[0, 2, 1]))
        masked = body.Where(hidden, MASKED, softmax.capped(body, body.Reshape(scores, by_head)))
        votes = probabilities(body, masked, None if sinks is None else body.Gather(sinks, head, axis=0))
        if silent is not None:
            votes = body.Where(silent, 0.0, votes)
        return str(body.ReduceSum(body.ReduceSum(votes, [2], keepdims=0), [1], keepdims=0))

    return str(emit.Transpose(emit.collect(scalar(emit, size(emit, "k", 1)), one_head), perm=[1, 0, 2]))


def page_bounds(emit: Emitter, keys: Vectors, stored: Value, layout: Layout) -> Value:
    """Return page maxima of K and of -K over the `stored` slots of `keys`, n of them, channel-major [B,G,2D,P].

    Where bounds are fp8, their codes. Bounds of keys in a format are those of the dequantised keys that attention
    reads.
    """
    page_size = one(emit, emit.attribute("page_size"))
    capacity = one(emit, emit.attribute("capacity"))
    pages = _stored_pages(emit, capacity, page_size, layout.page_multiple)
    lowest = layout.lowest if keys.format is None else layout.lowest.astype(np.float32)
    by_channel = emit.Transpose(keys.read(emit), perm=[0, 1, 3, 2])
    both = emit.Concat(by_channel, emit.Neg(by_channel), axis=2)
    if keys.format is not None:  # a maximum may lose a NaN, which all channels of a vector have or none
        both = emit.Where(emit.IsNaN(emit.Gather(by_channel, [0], axis=2)), np.float32(np.inf), both)
    marked = emit.Where(emit.Unsqueeze(stored, [2]), both, lowest)
    missing = emit.Sub(emit.Mul(pages, page_size), size(emit, marked, 3))
    padded = emit.Pad(marked, emit.Concat([0], missing, axis=0), lowest, [3])
    paged = emit.Reshape(padded, emit.Concat([0, 0, 0], pages, page_size, axis=0))
    maxima = emit.ReduceMax(paged, [4], keepdims=0)
    if layout.fp8_bounds:
        return write_codes(emit, float32(emit, maxima))
    if keys.format is None:
        return str(maxima)
    return bounds_of_read(emit, emit.Where(emit.IsInf(maxima), np.float32(np.nan), maxima), layout)


def _stored_pages(emit: Emitter, capacity: Value, page_size: Value, multiple: int) -> Value:
    """Return P (`dimensions.stored_pages`)."""
    if multiple == 1:
        return str(emit.Div(emit.Sub(emit.Add(capacity, page_size), 1), page_size))
    together = emit.Mul(page_size, multiple)
    return str(emit.Mul(emit.Div(emit.Sub(emit.Add(capacity, together), 1), together), multiple))


OWN_BUDGETS = Tensor("prompt_budgets", INT64, ("B",), "tokens that a row keeps, clamped to window..prompt_budget")
OWN_KERNELS = Tensor("pool_kernels", INT64, ("B",), "odd: a row's width of the max-pooling, at most pool_kernel")

COMPACT = Operator(
    name="KvcCompact",
    summary="Keep the part of a prompt's cache that its last queries look at.",
    inputs=(WINDOW, PROMPT_KEYS, PROMPT_VALUES, PROMPT_LENGTHS),
    outputs=(
        replace(K_CACHE, summary="zeros past a row's end. k itself where the strides say [B,G,S=C,D]"),
        replace(V_CACHE, summary="in place exactly if k_cache is"),
        replace(BOUNDS, summary="page maxima of K, then of -K", optional=True),
        STORED_LENGTHS,
        INDICES,
    ),
    attributes=(
        Attribute("prompt_budget", 1, MAX_TOKENS, "tokens kept per KV head, window included", at_most="capacity"),
        CAPACITY,
        Attribute("pool_kernel", 1, 4095, "width of the max-pooling over scores", bits=32, odd=True),
        PAGE_SIZE,
        FP8_BOUNDS,
    ),
    formulas={"C": "capacity"},
    write=_write,
    by_length=(OWN_BUDGETS, OWN_KERNELS),
    attends=True,
    stores=True,
    kernel=Kernel(
        "kvc_compact",
        "KvcCompactParams",
        strided=("k", "v"),
        in_place={"k_cache": "k", "v_cache": "v"},
        strides=(
            Stride("kv_stride_batch", 0, ("D", "S", "G"), "elements between rows of k and v"),
            Stride(
                "kv_stride_head",
                1,
                ("D", "S"),
                "elements between KV heads; strides are at least D and multiples of 8",
            ),
            Stride("kv_stride_token", 2, ("D",), "elements between tokens of k and v; head elements are contiguous"),
        ),
    ),
)

COMPACT_TURN = Operator(
    name="KvcCompactTurn",
    summary="Keep the part of stored and new tokens that the last queries of a turn look at.",
    inputs=(
        replace(WINDOW, summary="the last queries of the turn, right-aligned"),
        STORED_KEYS,
        STORED_VALUES,
        replace(PROMPT_LENGTHS, summary="stored and new tokens"),
        Tensor("window_lengths", INT64, ("B",), "how many rows of q_window are the row's own, 1..W"),
    ),
    outputs=(
        replace(K_CACHE, summary="zeros past a row's end"),
        V_CACHE,
        replace(BOUNDS, optional=True),
        STORED_LENGTHS,
        replace(INDICES, summary="kept entries of k, ascending; -1 past the row's end"),
    ),
    attributes=COMPACT.attributes,
    formulas=COMPACT.formulas,
    write=_write_turn,
    by_length=COMPACT.by_length,
    attends=True,
    stores=True,
    kernel=Kernel("kvc_compact_turn", "KvcCompactTurnParams"),
)

COMPACT_AVERAGE = replace(
    COMPACT,
    name="KvcCompactAverage",
    summary="KvcCompact with average-pooling: pool_kernel and pool_kernels are its widths.",
    write=_write_average,
    kernel=None,
)
BY_WINDOW = frozenset((COMPACT.name, COMPACT_AVERAGE.name))
"""The compactions of a prompt that follow from their first three inputs: the last queries, keys and values."""

COMPACT_AVERAGE_TURN = replace(
    COMPACT_TURN,
    name="KvcCompactAverageTurn",
    summary="KvcCompactTurn with average-pooling.",
    write=_write_average_turn,
    kernel=None,
)
