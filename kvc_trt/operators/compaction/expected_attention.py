"""KvcCompactExpectedAttention: keep the prompt tokens that future queries are expected to attend to.

Source: Expected Attention (arXiv 2510.00636); exact rule in docs/policies/expected-attention.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.operators.compaction.expected_queries import QUERY_COVARIANCE, QUERY_MEAN, SINKS
from kvc_trt.operators.compaction.keep_best import among_row
from kvc_trt.operators.compaction.scored import scored_compaction
from kvc_trt.operators.shapes import MASKED, attention_scale, count_to, float32, scalar, size
from kvc_trt.operators.vectors import EXACT, Tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _rank(emit: Emitter, tables: Tables) -> Value:
    """Return the rank of each position (steps 3 to 5 of the rule); sinks rank highest."""
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1, 1]), count_to(emit, size(emit, "k", 2))
    contested = emit.GreaterOrEqual(columns, emit.attribute("sinks"))
    visible = emit.And(contested, emit.Less(columns, rows))
    channels = ("k", 3) if tables is EXACT else ("query_mean", 2)  # codes of keys may be packed
    by_group = emit.Concat([0], size(emit, "k", 1), [-1], size(emit, *channels), axis=0)
    means = emit.Reshape(emit.Mul("query_mean", attention_scale(emit, *channels)), by_group)
    by_matrix = emit.Concat([0], size(emit, "k", 1), [-1], size(emit, *channels), size(emit, *channels), axis=0)
    halves = emit.Reshape(emit.Div("query_covariance", emit.Mul(float32(emit, size(emit, *channels)), 2.0)), by_matrix)

    def one_head(body: Emitter, head: Value) -> Value:
        keys = tables.keys.of_head(body, head)
        logits = body.MatMul(body.Gather(means, head, axis=1), body.Transpose(keys, perm=[0, 2, 1]))
        alone = body.Unsqueeze(keys, [1])
        spread = body.MatMul(alone, body.Gather(halves, head, axis=1))
        logits = body.Add(logits, body.ReduceSum(body.Mul(spread, alone), [3], keepdims=0))
        attention = body.ReduceMean(body.Softmax(body.Where(visible, logits, MASKED), axis=-1), [1], keepdims=0)
        values = tables.values.of_head(body, head)
        return str(body.Mul(attention, body.ReduceL2(values, [2], keepdims=0)))

    by_head = emit.collect(scalar(emit, size(emit, "k", 1)), one_head)
    return among_row(emit, emit.Transpose(by_head, perm=[1, 0, 2]), contested)


_BUDGET = "tokens kept per KV head, sinks included"

COMPACT_EXPECTED_ATTENTION = scored_compaction(
    "KvcCompactExpectedAttention",
    "Keep the tokens of a prompt that queries to come can be expected to attend to.",
    _rank,
    inputs=(QUERY_MEAN, QUERY_COVARIANCE),
    extra=(SINKS,),
    budget=_BUDGET,
)
COMPACT_EXPECTED_ATTENTION_OF_TURN = scored_compaction(
    "KvcCompactExpectedAttentionOfTurn",
    "KvcCompactExpectedAttention over stored and new tokens of a cache that has a format.",
    _rank,
    inputs=(QUERY_MEAN, QUERY_COVARIANCE),
    extra=(SINKS,),
    budget=_BUDGET,
    of_turn=True,
)
