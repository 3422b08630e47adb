"""KvcCompactHeavyHittersOfTurn: after a turn, the last tokens and those that have received the most attention.

Source: H2O (arXiv 2306.14048), section 4; exact rule in docs/policies/. The attention of the turn's queries is added to
the sum that each stored token has received before. In KvcCompactHeavyHittersOfTurnByRow each row keeps a number of its
own.

The body is not `compaction/beside_recent.py`'s, although it does the same: scores are results here even where rows have
budgets of their own, and it marks the contested tokens before the branch that evicts. Graphs of engines would change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.attention.heavy_hitter_attention import SCORES
from kvc_trt.operators.attention.stored_rows import RECENTS, own_recents
from kvc_trt.operators.compaction.heavy_hitters import COMPACT_HEAVY_HITTERS
from kvc_trt.operators.compaction.keep_best import among_row, keep_with_scores
from kvc_trt.operators.compaction.trim_beside_recent import BUDGETS
from kvc_trt.operators.schema import INT32, Operator, Tensor
from kvc_trt.operators.shapes import Layout, count_to, pad_end, scalar, size
from kvc_trt.operators.tensors import PROMPT_LENGTHS
from kvc_trt.operators.turns.append_block import LENGTHS
from kvc_trt.operators.turns.extend_attention import (
    STORED_BEFORE,
    TURN_KEYS,
    TURN_QUERIES,
    TURN_VALUES,
    query_blocks,
    weights_of_turn,
)
from kvc_trt.operators.vectors import Vectors, stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout, *, by_row: bool = False) -> Mapping[str, Value]:
    """Write the body of KvcCompactHeavyHittersOfTurn; k and v hold stored tokens by position, then the new ones."""
    tables = stored_tables(layout, TURN_KEYS, TURN_VALUES)
    received = _received(emit, tables.keys)
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1, 1]), count_to(emit, size(emit, "k", 2))
    contested = emit.Less(columns, emit.Sub(rows, own_recents(emit, by_row=by_row)))
    budgets = BUDGETS.name if by_row else None

    def rank(branch: Emitter) -> Value:
        return among_row(branch, received, contested)

    return keep_with_scores(emit, layout, received, rank, tables, budgets)


def _received(emit: Emitter, keys: Vectors) -> Value:
    """Return the attention that each token received before and from the turn's queries, summed over the group; FLOAT
    [B,G,T]."""
    blocks = query_blocks(emit)
    length, last = size(emit, "k", 2), emit.Sub(blocks.count, 1)
    lengths = emit.Reshape("lengths", [-1, 1, 1, 1, 1])
    stored = emit.Less(count_to(emit, size(emit, "stored_scores", 2)), emit.Reshape("stored_lengths", [-1, 1, 1]))
    ordered = emit.Where(stored, emit.GatherElements("stored_scores", "order", axis=2), np.float32(0))

    def block(body: Emitter, iteration: Value, total: Value) -> Value:
        weights, end, places = weights_of_turn(body, blocks, keys, body.Sub(last, iteration), "stored_lengths")
        real = body.Less(body.Unsqueeze(places, [1]), lengths)
        paid = body.ReduceSum(body.Where(real, weights, 0.0), [2, 3], keepdims=0)
        padding = body.Concat([0], body.Sub(length, end), axis=0)
        return str(body.Add(total, body.Pad(paid, padding, 0.0, [2])))

    before = pad_end(emit, ordered, scalar(emit, length), np.float32(0))
    return emit.accumulate(blocks.count, before, block)


COMPACT_HEAVY_HITTERS_OF_TURN = Operator(
    name="KvcCompactHeavyHittersOfTurn",
    summary="Keep the last tokens after a turn, and of the others those that received most attention.",
    inputs=(
        TURN_QUERIES,
        TURN_KEYS,
        TURN_VALUES,
        replace(SCORES, name="stored_scores"),
        Tensor("order", INT32, ("B", "G", "C"), "the slot of each stored entry of k"),
        replace(STORED_BEFORE, name="stored_lengths"),
        replace(PROMPT_LENGTHS, summary="stored and new tokens"),
        LENGTHS,
    ),
    outputs=COMPACT_HEAVY_HITTERS.outputs,
    attributes=COMPACT_HEAVY_HITTERS.attributes,
    formulas=COMPACT_HEAVY_HITTERS.formulas,
    write=_write,
    stores=True,
    native=False,
)

COMPACT_HEAVY_HITTERS_OF_TURN_BY_ROW = replace(
    COMPACT_HEAVY_HITTERS_OF_TURN,
    name="KvcCompactHeavyHittersOfTurnByRow",
    summary="KvcCompactHeavyHittersOfTurn with a budget of its own for each row.",
    inputs=(*COMPACT_HEAVY_HITTERS_OF_TURN.inputs, BUDGETS, RECENTS),
    attributes=COMPACT_HEAVY_HITTERS_OF_TURN.attributes[:2],
    write=partial(_write, by_row=True),
)
