"""KvcTrimBesideRecent: cut the kept tokens of a prompt to each row's budget, once the budgets are known.

For evictions that keep the last tokens and the best of the others: the tokens kept at a smaller budget are among those
kept at a larger one, even where the share of last tokens follows the budget. So a layer keeps as much as it may get,
with scores, and is trimmed when SqueezeAttention (arXiv 2404.04793) has set the budgets of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.attention.heavy_hitter_attention import SCORES, SLOT_POSITIONS
from kvc_trt.operators.attention.stored_rows import RECENTS, own_recents
from kvc_trt.operators.compaction.compact import STORED_KEYS, STORED_VALUES
from kvc_trt.operators.compaction.keep_best import among_row, keep_with_scores
from kvc_trt.operators.compaction.scored import compaction
from kvc_trt.operators.schema import INT64, Tensor
from kvc_trt.operators.shapes import Layout, count_to, size
from kvc_trt.operators.vectors import stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

BUDGETS = Tensor("budgets", INT64, ("B",), "tokens that each row keeps, at most prompt_budget")
KEPT_SCORES = replace(SCORES, name="kept_scores", shape=("B", "G", "S"), summary="by which they are ranked")
KEPT_POSITIONS = replace(SLOT_POSITIONS, name="kept_positions", shape=("B", "G", "S"), summary="ascending; -1 if empty")


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body; `prompt_lengths` counts the tokens in `k` and `v`, which are in the order of the text."""
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1, 1]), count_to(emit, size(emit, "k", 2))
    contested = emit.Less(columns, emit.Sub(rows, own_recents(emit, by_row=True)))
    tables = stored_tables(layout, STORED_KEYS, STORED_VALUES)

    def rank(branch: Emitter) -> Value:
        return among_row(branch, KEPT_SCORES.name, contested)

    kept = keep_with_scores(emit, layout, KEPT_SCORES.name, rank, tables, BUDGETS.name)
    among = emit.cast(emit.Max(kept["indices"], np.int32(0)), np.int64)
    there = emit.GatherElements(KEPT_POSITIONS.name, among, axis=2)
    indices = emit.Where(emit.Less(kept["indices"], np.int32(0)), np.int32(-1), there)
    return {**kept, "indices": indices, "slot_positions": emit.Identity(indices)}


TRIM_BESIDE_RECENT = compaction(
    "KvcTrimBesideRecent",
    "Cut what was kept of a prompt to each row's budget: its last tokens, and the best of the others.",
    _write,
    inputs=(KEPT_SCORES, KEPT_POSITIONS, BUDGETS, RECENTS),
    state=(SCORES, SLOT_POSITIONS),
    tables=(STORED_KEYS, STORED_VALUES),
)
