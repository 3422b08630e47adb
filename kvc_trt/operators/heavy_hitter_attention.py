"""KvcHeavyHitterAttention: append one token, attend to every entry, drop the one that received least attention.

Source: H2O (arXiv 2306.14048), section 4; exact rule in docs/policies/. Each KV head drops an entry of its own: the
next token takes the slot that became free, so the order of slots is not that of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.append import Place
from kvc_trt.operators.attend import attend_and_show, group_query, ungroup
from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.schema import FLOAT, INT32, INT64, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import HeadShape, Layout, count_to, int32, one, size
from kvc_trt.operators.slots import pad_end
from kvc_trt.operators.tensors import CACHE_LENGTHS, CAPACITY, K_CACHE, OUTPUT, STEP, V_CACHE, updated

if TYPE_CHECKING:
    from onnx import FunctionProto

    from kvc_trt.operators.emitter import Emitter, Value

SCORES = Tensor("scores", FLOAT, ("B", "G", "C"), "attention that each entry has received")
SLOT_POSITIONS = Tensor(
    "slot_positions", INT32, ("B", "G", "C"), "position of each entry in the text, -1 in an empty slot", fill=-1.0
)
RECENT = Attribute("recent", 0, MAX_TOKENS, "last tokens, which always stay", at_most="capacity")
NOT_A_NUMBER = -1.0
NEVER = np.float32(3e38)
"""Above every score: what must not be dropped."""
EMPTY = np.int32(-1)


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """The body.

    `cache_lengths` counts the prompt's entries and every token since; `positions` are the new tokens' in the text. A
    row that uses all C slots drops one entry: not one of the last `recent` tokens, of the others that with the least
    score, among equals the last. While every row fits, attention is the code of KvcDenseAttention on the same slice.
    """
    shape = layout.shape
    free = emit.ArgMin("slot_positions", axis=2)
    place = Place(emit, "cache_lengths", shape, emit.Unsqueeze(free, [3]))
    keys, values = place.append("k_cache", "k_new"), place.append("v_cache", "v_new")
    capacity = emit.attribute("capacity")
    stored = emit.Add(emit.Reshape("cache_lengths", [-1, 1, 1, 1]), 1)
    longest = emit.ReduceMax(stored, keepdims=0)
    query = group_query(emit, "query", shape)

    def attended(branch: Emitter, keys: Value, values: Value) -> list[Value]:
        visible = branch.Less(count_to(branch, size(branch, keys, 2)), stored)
        output, weights = attend_and_show(branch, query, keys, values, visible)
        return [output, pad_end(branch, branch.ReduceSum(weights, [2], keepdims=0), capacity, np.float32(0))]

    def sliced(branch: Emitter) -> list[Value]:
        return attended(branch, *(branch.Slice(cache, [0], one(branch, longest), [2]) for cache in (keys, values)))

    def in_place(branch: Emitter) -> list[Value]:
        return attended(branch, keys, values)

    fits = emit.LessOrEqual(longest, capacity)
    output, received = emit.choose(fits, sliced, in_place, outputs=2)
    scores, slot_positions = _drop(emit, free, received, stored)
    return {
        "output": ungroup(emit, output, "query", shape),
        "k_cache_out": keys,
        "v_cache_out": values,
        "scores_out": scores,
        "slot_positions_out": slot_positions,
    }


def _drop(emit: Emitter, free: Value, received: Value, stored: Value) -> tuple[Value, Value]:
    """Scores and positions [B,G,C] after this step, whose new entry is in slot `free` [B,G,1]."""
    capacity, recent = emit.attribute("capacity"), emit.attribute("recent")
    new = int32(emit, emit.Reshape("positions", [-1, 1, 1]))
    occupied = emit.Where(emit.Equal(emit.Range(0, capacity, 1), free), new, "slot_positions")
    score = emit.Add("scores", received)
    full = emit.GreaterOrEqual(emit.Squeeze(stored, [3]), capacity)
    contested = emit.LessOrEqual(occupied, emit.Sub(new, int32(emit, recent)))
    rank = emit.Where(emit.GreaterOrEqual(score, 0.0), score, NOT_A_NUMBER)
    rank = emit.Where(emit.And(full, contested), rank, NEVER)
    least = emit.Equal(rank, emit.ReduceMin(rank, [2]))
    # Where nothing may be dropped, all ranks are NEVER.
    candidates = emit.Where(emit.And(least, emit.Less(rank, NEVER)), occupied, EMPTY)
    dropped = emit.Equal(occupied, emit.ReduceMax(candidates, [2]))
    return emit.Where(dropped, 0.0, score), emit.Where(dropped, EMPTY, occupied)


HEAVY_HITTER_ATTENTION = Operator(
    name="KvcHeavyHitterAttention",
    summary="Append one token, attend to every entry, drop the one that received least attention.",
    inputs=(
        *STEP,
        SCORES,
        SLOT_POSITIONS,
        CACHE_LENGTHS,
        Tensor("positions", INT64, ("B",), "of the new tokens in the text"),
    ),
    outputs=(OUTPUT, updated(K_CACHE), updated(V_CACHE), updated(SCORES), updated(SLOT_POSITIONS)),
    attributes=(CAPACITY, RECENT),
    write=_write,
)

NAME, STATE = HEAVY_HITTER_ATTENTION.name, tuple(tensor.name for tensor in HEAVY_HITTER_ATTENTION.state)


def heavy_hitter_attention(shape: HeadShape) -> FunctionProto:
    """The body for an attention shape."""
    return HEAVY_HITTER_ATTENTION.body(Layout(shape))
