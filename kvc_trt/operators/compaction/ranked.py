"""KvcCompactRanked: KvcCompact for layers whose budget is not known yet.

Rankings are nested: the best b tokens are among the best b' of any larger budget. So a layer keeps its best
`prompt_budget` tokens with their ranks, and KvcTrim cuts them once SqueezeAttention (arXiv 2404.04793) has set the
budgets of all layers. At most one layer's full cache is in memory at a time, as without layer budgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.compaction.compact import Pool, max_pool, page_bounds, rank, sum_pool
from kvc_trt.operators.compaction.keep_best import LAST_INDEX
from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.schema import CACHE, INT64, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import Layout, count_to, int32, into_slots, one, pad_end, size
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
    WINDOW,
)
from kvc_trt.operators.vectors import EXACT, stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

KEPT = (
    Tensor("k_kept", CACHE, ("B", "G", "N", "D"), stored="keys"),
    Tensor("v_kept", CACHE, ("B", "G", "N", "D"), stored="values"),
    Tensor("kept", INT64, ("B", "G", "N"), "prompt positions, ascending"),
    Tensor("ranks", INT64, ("B", "G", "N"), "which of them would be kept first"),
)
"""A layer's tokens until its budget is known: its best N = min(prompt_budget, S) tokens."""


def _write_average_ranked(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcCompactAverageRanked: KvcCompactRanked's, with sums in place of maxima."""
    return _write_ranked(emit, layout, sum_pool)


def _write_ranked(emit: Emitter, layout: Layout, pool: Pool = max_pool) -> Mapping[str, Value]:
    """Write the body of KvcCompactRanked. Padding ranks last."""
    wanted = emit.Min(one(emit, emit.attribute("prompt_budget")), size(emit, "k", 2))
    _, best = emit.TopK(rank(emit, EXACT.keys, layout, pool=pool), wanted, outputs=2, axis=2)
    kept, ranks = emit.TopK(best, wanted, outputs=2, axis=2, largest=0)
    where = emit.Unsqueeze(kept, [3])
    held = EXACT.map(lambda rows: emit.GatherND(rows, where, batch_dims=2)).stored(emit, layout)
    return {**held.named(*KEPT[:2]), "kept": kept, "ranks": ranks}


def _write_trim(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcTrim: each row keeps its best `budgets` tokens, in prompt order."""
    lengths = emit.Min("prompt_lengths", "budgets")
    entries = size(emit, "k_kept", 2)
    stays = emit.Less("ranks", emit.Reshape(lengths, [-1, 1, 1]))
    slots, _ = emit.TopK(emit.Where(stays, count_to(emit, entries), LAST_INDEX), entries, outputs=2, axis=2, largest=0)
    taken = emit.Min(slots, emit.Sub(entries, 1))
    stored = emit.Less(count_to(emit, entries), emit.Reshape(lengths, [-1, 1, 1]))
    held = stored_tables(layout, *KEPT[:2]).map(lambda rows: _gathered(emit, rows, taken))
    caches = held.map(lambda rows: into_slots(emit, rows, emit.Unsqueeze(stored, [3])))
    positions = emit.Where(stored, emit.GatherElements("kept", taken, axis=2), -1)
    return {
        **caches.named(K_CACHE, V_CACHE),
        "bounds": page_bounds(emit, held.keys, stored, layout),
        "cache_lengths": lengths,
        "indices": int32(emit, pad_end(emit, positions, emit.attribute("capacity"), np.int64(-1))),
    }


def _gathered(emit: Emitter, rows: Value, slots: Value) -> Value:
    return str(emit.GatherND(rows, emit.Unsqueeze(slots, [3]), batch_dims=2))


COMPACT_RANKED = Operator(
    name="KvcCompactRanked",
    summary="KvcCompact for a layer whose budget is not known yet.",
    inputs=(WINDOW, PROMPT_KEYS, PROMPT_VALUES, PROMPT_LENGTHS),
    outputs=KEPT,
    attributes=(Attribute("prompt_budget", 1, MAX_TOKENS, "the largest budget that the layer may get"),),
    formulas={"N": "min(prompt_budget, S)"},
    write=_write_ranked,
    attends=True,
    stores=True,
)

COMPACT_AVERAGE_RANKED = replace(
    COMPACT_RANKED,
    name="KvcCompactAverageRanked",
    summary="KvcCompactRanked with average-pooling.",
    write=_write_average_ranked,
)

TRIM = Operator(
    name="KvcTrim",
    summary="Cut what KvcCompactRanked kept to a layer's budget.",
    inputs=(*KEPT, Tensor("budgets", INT64, ("B",), "tokens that each row keeps"), PROMPT_LENGTHS),
    outputs=(K_CACHE, V_CACHE, BOUNDS, replace(STORED_LENGTHS, summary="min(n, budget)"), INDICES),
    attributes=(CAPACITY, PAGE_SIZE, FP8_BOUNDS),
    formulas={"C": "capacity"},
    write=_write_trim,
    stores=True,
)
