"""The channels on which a group's query is largest, and what scores on them are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.operators.shapes import one

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def largest_channels(emit: Emitter, query: Value) -> Value:
    """INT64 [B,G,top_r], unordered: by |q| summed over the group of `query` [B,G,g,D]."""
    sums = emit.ReduceL1(query, [2], keepdims=0)
    _, channels = emit.TopK(sums, one(emit, emit.attribute("top_r")), outputs=2, axis=2, sorted=0)
    return str(channels)


def temperature(emit: Emitter, query: Value, selected: Value, head_size: int) -> Value:
    """sqrt(D * covered share of |q|) per head, sqrt(D) where nothing is covered; [B,G,g,1]."""
    covered = emit.ReduceL1(selected, [3])
    share = emit.Div(covered, emit.ReduceL1(query, [3]))
    share = emit.Where(emit.Greater(covered, 0.0), share, 1.0)
    return str(emit.Sqrt(emit.Mul(share, float(head_size))))
