"""KvcCompactKeydiff: keep the tokens of a prompt whose keys differ most from the mean direction of all keys.

Source: KeyDiff (arXiv 2504.15364), section 3; exact rule in docs/policies/keydiff.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.compaction.keep_best import among_row
from kvc_trt.operators.compaction.scored import scored_compaction
from kvc_trt.operators.shapes import count_to, float32, scalar, size
from kvc_trt.operators.vectors import Tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

SHORTEST = np.float32(1e-12)
"""Smallest length by which a key is divided, so that a key of zeros stays one."""


def _rank(emit: Emitter, tables: Tables) -> Value:
    """Return the rank of each position, FLOAT [B,G,S]: low along the row's mean direction."""
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1]), count_to(emit, size(emit, "k", 2))
    real = emit.Less(columns, rows)
    count = float32(emit, emit.Unsqueeze(rows, [2]))

    def one_head(body: Emitter, head: Value) -> Value:
        keys = tables.keys.of_head(body, head)
        length = body.Max(body.ReduceL2(keys, [2]), SHORTEST)
        scaled = body.Where(body.Unsqueeze(real, [2]), body.Div(keys, length), 0.0)
        anchor = body.Div(body.ReduceSum(scaled, [1]), count)
        return str(body.Neg(body.ReduceSum(body.Mul(scaled, anchor), [2], keepdims=0)))

    by_head = emit.collect(scalar(emit, size(emit, "k", 1)), one_head)
    return among_row(emit, emit.Transpose(by_head, perm=[1, 0, 2]), emit.Unsqueeze(real, [1]))


COMPACT_KEYDIFF = scored_compaction(
    "KvcCompactKeydiff",
    "Keep the tokens of a prompt whose keys differ most from the mean direction of all keys.",
    _rank,
)
COMPACT_KEYDIFF_OF_TURN = scored_compaction(
    "KvcCompactKeydiffOfTurn",
    "KvcCompactKeydiff over stored and new tokens of a cache that has a format.",
    _rank,
    of_turn=True,
)
