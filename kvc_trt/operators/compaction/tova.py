"""KvcCompactTova: keep the last tokens of a prompt and the others that its last query attends to most.

Source: TOVA (arXiv 2401.06104), section 3; exact rule in docs/policies/tova.md. All KV heads keep the same tokens.
KvcCompactTovaScored is for a layer whose budget is not known yet, KvcCompactTovaOfTurnByRow for one whose rows keep
different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.heavy_hitter_attention import RECENT, SCORES, SLOT_POSITIONS
from kvc_trt.operators.attention.stored_rows import RECENTS, own_recents
from kvc_trt.operators.compaction.compact import observed_attention
from kvc_trt.operators.compaction.keep_best import among_row, keep_with_scores
from kvc_trt.operators.compaction.scored import OF_TURN, compaction, scored_compaction
from kvc_trt.operators.compaction.trim_beside_recent import BUDGETS
from kvc_trt.operators.shapes import Layout, count_to, size
from kvc_trt.operators.tensors import WINDOW
from kvc_trt.operators.vectors import EXACT, Tables, stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _rank(emit: Emitter, tables: Tables) -> Value:
    """Return the rank of each position, FLOAT [B,G,S]; the last tokens rank highest, all KV heads alike."""
    return _among(emit, _scores(emit, tables), by_row=False)


def _scores(emit: Emitter, tables: Tables) -> Value:
    """Return the attention of the last query to each position, FLOAT [B,G,S]."""
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1, 1]), count_to(emit, size(emit, "k", 2))
    paid = emit.ReduceSum(observed_attention(emit, tables.keys, rows, columns), [1])
    return str(emit.Expand(paid, emit.Shape("k", end=3)))


def _among(emit: Emitter, scores: Value, *, by_row: bool) -> Value:
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1, 1]), count_to(emit, size(emit, "k", 2))
    return among_row(emit, scores, emit.Less(columns, emit.Sub(rows, own_recents(emit, by_row=by_row))))


def _write_scored(emit: Emitter, layout: Layout, *, by_row: bool = False) -> Mapping[str, Value]:
    """Write the body of an operator that returns the scores of the kept tokens, or of one whose rows have budgets."""
    tables = stored_tables(layout, *OF_TURN) if by_row else EXACT
    scores = _scores(emit, tables)
    budgets = BUDGETS.name if by_row else None

    def rank(branch: Emitter) -> Value:
        return _among(branch, scores, by_row=by_row)

    kept = keep_with_scores(emit, layout, scores, rank, tables, budgets)
    return {name: value for name, value in kept.items() if not (by_row and name == SCORES.name)}


_LAST_QUERY = replace(WINDOW, summary="W = 1: the last query")
_BUDGET = "tokens kept, the same for all KV heads"

COMPACT_TOVA = scored_compaction(
    "KvcCompactTova",
    "Keep the last tokens of a prompt, and of the others those that its last query looks at most.",
    _rank,
    inputs=(_LAST_QUERY,),
    state=SLOT_POSITIONS,
    extra=(RECENT,),
    budget=_BUDGET,
)
COMPACT_TOVA_OF_TURN = scored_compaction(
    "KvcCompactTovaOfTurn",
    "KvcCompactTova over stored and new tokens of a cache that has a format.",
    _rank,
    inputs=(_LAST_QUERY,),
    state=SLOT_POSITIONS,
    extra=(RECENT,),
    budget=_BUDGET,
    of_turn=True,
)
COMPACT_TOVA_SCORED = replace(
    compaction(
        "KvcCompactTovaScored",
        "KvcCompactTova for a layer whose budget is not known yet.",
        _write_scored,
        inputs=(_LAST_QUERY,),
        state=(SCORES, SLOT_POSITIONS),
        extra=(RECENT,),
        budget=_BUDGET,
    ),
    native=False,
)
COMPACT_TOVA_OF_TURN_BY_ROW = compaction(
    "KvcCompactTovaOfTurnByRow",
    "KvcCompactTova over stored and new tokens, with a budget of its own for each row.",
    partial(_write_scored, by_row=True),
    inputs=(_LAST_QUERY, BUDGETS, RECENTS),
    state=(SLOT_POSITIONS,),
    budget=_BUDGET,
    tables=OF_TURN,
)
