"""KvcExpectedQueries: mean and covariance of the queries expected after a prompt, per head.

Source: Expected Attention (arXiv 2510.00636); exact rule in docs/policies/expected-attention.md. The prompt's own
queries before their rotary embedding are averaged, and rotated by the mean rotation of the future positions. The size
of the result does not depend on the prompt's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.schema import CACHE, FLOAT, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import Layout, count_to, float32, scalar, size
from kvc_trt.operators.tensors import PROMPT_LENGTHS

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

SINKS = Attribute("sinks", 0, MAX_TOKENS, "first tokens, which do not count and always stay")
QUERY_MEAN = Tensor("query_mean", FLOAT, ("B", "H", "D"))
QUERY_COVARIANCE = Tensor("query_covariance", FLOAT, ("B", "H", "D", "D"), "divided by the number of queries")


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body. If all rows have at most `prompt_budget` tokens, the outputs are zeros that nothing reads."""
    heads, width = size(emit, "plain_queries", 2), size(emit, "plain_queries", 3)
    batch, sinks = size(emit, "plain_queries", 0), emit.attribute("sinks")

    def nothing(branch: Emitter) -> list[Value]:
        shape = branch.Concat(batch, heads, branch.Add(width, 1), width, axis=0)
        return [branch.Expand(np.zeros((1, 1, 1, 1), np.float32), shape)]

    too_long = emit.Greater(emit.ReduceMax("prompt_lengths", keepdims=0), emit.attribute("prompt_budget"))
    statistics = emit.choose(too_long, lambda branch: [_of_heads(branch, heads, sinks)], nothing, outputs=1)
    return _turned(emit, statistics)


def _write_turn(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcExpectedQueriesOfTurn, in which every query counts."""
    return _turned(emit, _of_heads(emit, size(emit, "plain_queries", 2), emit.constant(0)))


def _turned(emit: Emitter, statistics: Value) -> dict[str, Value]:
    """Rotate `statistics` [B,H,1+D,D], a mean and below it a covariance, to the positions to come."""
    width = size(emit, "plain_queries", 3)
    mean, covariance = emit.Split(statistics, emit.Concat([1], width, axis=0), axis=2, outputs=2)
    turned = emit.Transpose(_rotated(emit, emit.Transpose(covariance, perm=[0, 1, 3, 2])), perm=[0, 1, 3, 2])
    return {"query_mean": emit.Squeeze(_rotated(emit, mean), [2]), "query_covariance": _rotated(emit, turned)}


def _of_heads(emit: Emitter, heads: Value, sinks: Value) -> Value:
    """Return the mean of each head and below it the covariance, FLOAT [B,H,1+D,D], unrotated; one head at a time.

    The first `sinks` (scalar) queries do not count."""
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1]), count_to(emit, size(emit, "plain_queries", 1))
    counted = emit.Unsqueeze(emit.And(emit.GreaterOrEqual(columns, sinks), emit.Less(columns, rows)), [2])
    count = float32(emit, emit.Max(emit.Sub(emit.Unsqueeze(rows, [2]), sinks), 1))

    def one_head(body: Emitter, head: Value) -> Value:
        queries = float32(body, body.Gather("plain_queries", head, axis=2))
        mean = body.Div(body.ReduceSum(body.Where(counted, queries, 0.0), [1]), count)
        centred = body.Where(counted, body.Sub(queries, mean), 0.0)
        products = body.MatMul(body.Transpose(centred, perm=[0, 2, 1]), centred)
        return str(body.Concat(mean, body.Div(products, count), axis=1))

    return str(emit.Transpose(emit.collect(scalar(emit, heads), one_head), perm=[1, 0, 2, 3]))


def _rotated(emit: Emitter, x: Value) -> Value:
    """Return `x` [B,H,n,D] under the mean rotation; the halves of the last axis form the pairs."""
    cosine, sine = (emit.Unsqueeze(table, [1, 2]) for table in ("future_cosine", "future_sine"))
    left, right = emit.Split(x, axis=3, num_outputs=2, outputs=2)
    turned = emit.Sub(emit.Mul(left, cosine), emit.Mul(right, sine))
    return str(emit.Concat(turned, emit.Add(emit.Mul(right, cosine), emit.Mul(left, sine)), axis=3))


EXPECTED_QUERIES = Operator(
    name="KvcExpectedQueries",
    summary="Mean and covariance of the queries that are expected after a prompt, head by head.",
    inputs=(
        Tensor("plain_queries", CACHE, ("B", "S", "H", "D"), "before RoPE"),
        Tensor("future_cosine", FLOAT, ("B", "D/2"), "mean over the positions to come"),
        Tensor("future_sine", FLOAT, ("B", "D/2")),
        PROMPT_LENGTHS,
    ),
    outputs=(QUERY_MEAN, QUERY_COVARIANCE),
    attributes=(
        Attribute("prompt_budget", 1, MAX_TOKENS, "prompts of at most as many tokens keep all"),
        SINKS,
    ),
    write=_write,
)

EXPECTED_QUERIES_OF_TURN = Operator(
    name="KvcExpectedQueriesOfTurn",
    summary="Mean and covariance of the queries that are expected after a turn, head by head.",
    inputs=(
        *EXPECTED_QUERIES.inputs[:3],
        replace(PROMPT_LENGTHS, summary="new tokens of each row"),
    ),
    outputs=(QUERY_MEAN, QUERY_COVARIANCE),
    write=_write_turn,
    native=False,
)
