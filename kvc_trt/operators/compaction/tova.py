"""KvcCompactTova: keep the last tokens of a prompt and the others that its last query attends to most.

Source: TOVA (arXiv 2401.06104), section 3; exact rule in docs/policies/tova.md. All KV heads keep the same tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.heavy_hitter_attention import RECENT, SLOT_POSITIONS
from kvc_trt.operators.compaction.compact import observed_attention
from kvc_trt.operators.compaction.keep_best import among_row
from kvc_trt.operators.compaction.scored import scored_compaction
from kvc_trt.operators.shapes import count_to, size
from kvc_trt.operators.tensors import WINDOW
from kvc_trt.operators.vectors import Tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _rank(emit: Emitter, tables: Tables) -> Value:
    """Return the rank of each position, FLOAT [B,G,S]; the last tokens rank highest, all KV heads alike."""
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1, 1]), count_to(emit, size(emit, "k", 2))
    paid = emit.ReduceSum(observed_attention(emit, tables.keys, rows, columns), [1])
    scores = emit.Expand(paid, emit.Shape("k", end=3))
    return among_row(emit, scores, emit.Less(columns, emit.Sub(rows, emit.attribute("recent"))))


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
