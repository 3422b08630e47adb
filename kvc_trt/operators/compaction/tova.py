"""KvcCompactTova: keep the last tokens of a prompt and the others that its last query attends to most.

Source: TOVA (arXiv 2401.06104), section 3; exact rule in docs/policies/tova.md. All KV heads keep the same tokens.
KvcCompactTovaScored is for a layer whose budget is not known yet, KvcCompactTovaOfTurnByRow for one whose rows keep
different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.heavy_hitter_attention import RECENT, SCORES, SLOT_POSITIONS
from kvc_trt.operators.attention.stored_rows import RECENTS
from kvc_trt.operators.compaction.beside_recent import (
    keep_beside_recent,
    keep_beside_recent_by_row,
    rank_beside_recent,
)
from kvc_trt.operators.compaction.compact import observed_attention
from kvc_trt.operators.compaction.scored import OF_TURN, compaction, scored_compaction
from kvc_trt.operators.compaction.trim_beside_recent import BUDGETS
from kvc_trt.operators.shapes import count_to, size
from kvc_trt.operators.tensors import WINDOW
from kvc_trt.operators.vectors import Tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _score(emit: Emitter, tables: Tables) -> Value:
    """Return the attention of the last query to each position, FLOAT [B,G,S]."""
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1, 1]), count_to(emit, size(emit, "k", 2))
    paid = emit.ReduceSum(observed_attention(emit, tables.keys, rows, columns), [1])
    return str(emit.Expand(paid, emit.Shape("k", end=3)))


_LAST_QUERY = replace(WINDOW, summary="W = 1: the last query")
_BUDGET = "tokens kept, the same for all KV heads"

COMPACT_TOVA = scored_compaction(
    "KvcCompactTova",
    "Keep the last tokens of a prompt, and of the others those that its last query looks at most.",
    rank_beside_recent(_score),
    inputs=(_LAST_QUERY,),
    state=SLOT_POSITIONS,
    extra=(RECENT,),
    budget=_BUDGET,
)
COMPACT_TOVA_OF_TURN = scored_compaction(
    "KvcCompactTovaOfTurn",
    "KvcCompactTova over stored and new tokens of a cache that has a format.",
    rank_beside_recent(_score),
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
        keep_beside_recent(_score),
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
    keep_beside_recent_by_row(_score),
    inputs=(_LAST_QUERY, BUDGETS, RECENTS),
    state=(SLOT_POSITIONS,),
    budget=_BUDGET,
    tables=OF_TURN,
)
