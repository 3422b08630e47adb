"""KvcCompactTova: keep the last tokens of a prompt and the others that its last query attends to most.

Source: TOVA (arXiv 2401.06104), section 3; exact rule in docs/policies/tova.md. All KV heads keep the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.heavy_hitter_attention import RECENT, SLOT_POSITIONS
from kvc_trt.operators.compaction.compact import observed_attention
from kvc_trt.operators.compaction.keep_best import among_row, keep_best
from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.schema import Attribute, Operator
from kvc_trt.operators.shapes import Layout, count_to, size
from kvc_trt.operators.tensors import (
    CAPACITY,
    INDICES,
    K_CACHE,
    PROMPT_KEYS,
    PROMPT_LENGTHS,
    PROMPT_VALUES,
    STORED_LENGTHS,
    V_CACHE,
    WINDOW,
)

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body. `slot_positions` equals `indices`: the text position of each slot's token, -1 if empty."""
    outputs = keep_best(emit, _rank).outputs
    return {**outputs, "slot_positions": emit.Identity(outputs["indices"])}


def _rank(emit: Emitter) -> Value:
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1, 1]), count_to(emit, size(emit, "k", 2))
    paid = emit.ReduceSum(observed_attention(emit, rows, columns), [1])
    scores = emit.Expand(paid, emit.Shape("k", end=3))
    return among_row(emit, scores, emit.Less(columns, emit.Sub(rows, emit.attribute("recent"))))


COMPACT_TOVA = Operator(
    name="KvcCompactTova",
    summary="Keep the last tokens of a prompt, and of the others those that its last query looks at most.",
    inputs=(replace(WINDOW, summary="W = 1: the last query"), PROMPT_KEYS, PROMPT_VALUES, PROMPT_LENGTHS),
    outputs=(K_CACHE, V_CACHE, SLOT_POSITIONS, STORED_LENGTHS, INDICES),
    attributes=(
        Attribute("prompt_budget", 1, MAX_TOKENS, "tokens kept, the same for all KV heads", at_most="capacity"),
        CAPACITY,
        RECENT,
    ),
    formulas={"C": "capacity"},
    write=_write,
)
