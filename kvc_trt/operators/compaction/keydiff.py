"""KvcCompactKeydiff: keep the tokens of a prompt whose keys differ most from the mean direction of all keys.

Source: KeyDiff (arXiv 2504.15364), section 3; exact rule in docs/policies/keydiff.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.compaction.compact import page_bounds
from kvc_trt.operators.compaction.keep_best import among_row, keep_best
from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.schema import Attribute, Operator
from kvc_trt.operators.shapes import Layout, count_to, float32, scalar, size
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
)

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

SHORTEST = np.float32(1e-12)
"""Smallest length by which a key is divided, so that a key of zeros stays one."""


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcCompactKeydiff."""
    kept = keep_best(emit, _rank)
    return {**kept.outputs, "bounds": page_bounds(emit, kept.keys, kept.stored, layout)}


def _rank(emit: Emitter) -> Value:
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1]), count_to(emit, size(emit, "k", 2))
    real = emit.Less(columns, rows)
    count = float32(emit, emit.Unsqueeze(rows, [2]))

    def one_head(body: Emitter, head: Value) -> Value:
        keys = float32(body, body.Gather("k", head, axis=1))
        length = body.Max(body.ReduceL2(keys, [2]), SHORTEST)
        scaled = body.Where(body.Unsqueeze(real, [2]), body.Div(keys, length), 0.0)
        anchor = body.Div(body.ReduceSum(scaled, [1]), count)
        return str(body.Neg(body.ReduceSum(body.Mul(scaled, anchor), [2], keepdims=0)))

    by_head = emit.collect(scalar(emit, size(emit, "k", 1)), one_head)
    return among_row(emit, emit.Transpose(by_head, perm=[1, 0, 2]), emit.Unsqueeze(real, [1]))


COMPACT_KEYDIFF = Operator(
    name="KvcCompactKeydiff",
    summary="Keep the tokens of a prompt whose keys differ most from the mean direction of all keys.",
    inputs=(PROMPT_KEYS, PROMPT_VALUES, PROMPT_LENGTHS),
    outputs=(K_CACHE, V_CACHE, BOUNDS, STORED_LENGTHS, INDICES),
    attributes=(
        Attribute("prompt_budget", 1, MAX_TOKENS, "tokens kept per KV head", at_most="capacity"),
        CAPACITY,
        PAGE_SIZE,
        FP8_BOUNDS,
    ),
    formulas={"C": "capacity"},
    write=_write,
)
