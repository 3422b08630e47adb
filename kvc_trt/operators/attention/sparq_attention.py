"""KvcSparqAttention: append one token, score all tokens on a few channels, attend to the best ones (SparQ).

Source: SparQ (arXiv 2312.04985), algorithm 1; exact rule in docs/policies/sparq.md. `channels` holds the keys a second
time, channel-major [B,G,D,C]: a score on r channels reads r rows of it. `value_sum` is the running sum of the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.attend import attend
from kvc_trt.operators.attention.selective import (
    LOWEST_RANK,
    AppendedStep,
    append,
    ascending,
    attend_all_or,
    largest_channels,
    temperature,
)
from kvc_trt.operators.dimensions import MAX_HEAD_SIZE
from kvc_trt.operators.schema import CACHE, FLOAT, INT32, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import MASKED, Layout, float32, one, size
from kvc_trt.operators.tensors import (
    CACHE_LENGTHS,
    DENSE_UNTIL,
    K_CACHE,
    OUTPUT,
    STEP,
    TOKEN_BUDGET,
    TOP_K,
    V_CACHE,
    updated,
)

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

CHANNELS = Tensor("channels", CACHE, ("B", "G", "D", "C"), "the keys once more, channel by channel", stored="channels")
VALUE_SUM = Tensor("value_sum", FLOAT, ("B", "G", "D"), "sum of all stored values")


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcSparqAttention.

    The current token and `top_k` others are read; a row with at most max(token_budget, dense_until) entries attends to
    all of them. If all rows of the batch are that short, the code of KvcDenseAttention runs on the same slice. If the
    layout's number `reallocate` is set, the mean value receives the attention share of the unread tokens.
    """
    reallocate = bool(layout.number("reallocate"))
    place, step = append(emit, layout)
    channels = place.append_columns("channels", step.new.keys.codes(emit))
    value_sum = emit.Add("value_sum", step.new.values.widened(emit))

    def sparse(branch: Emitter) -> list[Value]:
        scores = _scores(branch, step, channels)
        tokens, taken = _choose(branch, step, scores)
        keys, values = step.gather(branch, step.rows(branch, tokens))
        visible = branch.Unsqueeze(taken, [2])
        attended = attend(branch, step.query, keys, values, visible)
        if reallocate:
            share = _share_read(branch, step, scores, tokens, visible)
            mean = branch.Div(branch.Unsqueeze(value_sum, [2]), float32(branch, step.lengths))
            attended = branch.Add(branch.Mul(share, attended), branch.Mul(branch.Sub(1.0, share), mean))
        return [attended, branch.Where(taken, tokens, -1)]

    output, read = attend_all_or(emit, step, sparse, lists=layout.shape.fixed_kv_heads)
    selected = ascending(emit, read, emit.Max(step.limit, emit.Add(emit.attribute("top_k"), 1)))
    state = {**step.caches(), "channels_out": channels, "value_sum_out": value_sum}
    return {"output": output, **state, "selected": selected}


def _scores(emit: Emitter, step: AppendedStep, channels: Value) -> Value:
    """Score the first slots per head on the group's channels, FLOAT [B,G,g,longest].

    The division follows the product, so that tokens with equal products stay equal.
    """
    query = step.query.plain
    row = emit.Unsqueeze(largest_channels(emit, query), [3])
    by_channel = emit.GatherND(emit.Transpose(query, perm=[0, 1, 3, 2]), row, batch_dims=2)
    chosen = emit.Transpose(by_channel, perm=[0, 1, 3, 2])
    keys = emit.Slice(emit.GatherND(channels, row, batch_dims=2), [0], one(emit, step.longest), [3])
    product = emit.MatMul(chosen, step.tables.keys.widened_channels(emit, keys, row, step.longest))
    return str(emit.Div(product, temperature(emit, query, chosen, step.layout.shape.head_size)))


def _choose(emit: Emitter, step: AppendedStep, scores: Value) -> tuple[Value, Value]:
    """Choose the tokens to read: (tokens INT64 [B,G,T], the current one first, then the best; taken BOOL [B,1,T])."""
    summed = emit.ReduceSum(scores, [2], keepdims=0)
    lengths = emit.Squeeze(step.lengths, [3])
    slots, current = emit.Range(0, step.longest, 1), emit.Sub(lengths, 1)
    comparable = emit.And(emit.Not(emit.IsNaN(summed)), emit.Less(slots, current))
    ranked = emit.Where(comparable, summed, emit.Where(emit.Equal(slots, current), -LOWEST_RANK, LOWEST_RANK))
    budget = emit.Min(lengths, emit.Add(emit.attribute("top_k"), 1))
    wanted = emit.Where(emit.LessOrEqual(lengths, step.limit), lengths, budget)
    count = emit.ReduceMax(wanted, keepdims=0)
    _, tokens = emit.TopK(ranked, one(emit, count), outputs=2, axis=2)
    return tokens, emit.Less(emit.Range(0, count, 1), wanted)


def _share_read(emit: Emitter, step: AppendedStep, scores: Value, tokens: Value, visible: Value) -> Value:
    """Return the share of each head's attention that its scores give to the tokens read; FLOAT [B,G,g,1]."""
    in_use = emit.Less(emit.Range(0, step.longest, 1), step.lengths)
    # Empty slots score 0, so adding is cheaper than Where, which makes more passes over all scores.
    weights = emit.Softmax(emit.Add(scores, emit.Where(in_use, 0.0, MASKED)), axis=-1)
    per_head = emit.Expand(emit.Unsqueeze(tokens, [2]), emit.Concat([1, 1], size(emit, scores, 2), [1], axis=0))
    read = emit.GatherElements(weights, per_head, axis=3)
    return str(emit.ReduceSum(emit.Where(visible, read, 0.0), [3]))


SPARQ_ATTENTION = Operator(
    name="KvcSparqAttention",
    summary="Append one token, score all by a few channels, attend to the best ones.",
    inputs=(*STEP, CHANNELS, VALUE_SUM, CACHE_LENGTHS),
    outputs=(
        OUTPUT,
        updated(K_CACHE),
        updated(V_CACHE),
        updated(CHANNELS),
        updated(VALUE_SUM),
        Tensor("selected", INT32, ("B", "G", "K"), "slots read, ascending, -1 past the end"),
    ),
    attributes=(
        Attribute("top_r", 1, MAX_HEAD_SIZE, "channels that score tokens", bits=32, at_most="D"),
        TOP_K,
        TOKEN_BUDGET,
        DENSE_UNTIL,
    ),
    formulas={"K": "max(top_k + 1, token_budget, dense_until)"},
    write=_write,
    stores=True,
)
