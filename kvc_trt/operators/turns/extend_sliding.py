"""KvcExtendSlidingAttention: KvcExtendAttention in a layer where each token sees the last ones alone.

The cache is a ring of as many slots as a token sees, itself included. A turn's first token sees all of the ring but the
oldest entry; later ones see less of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from kvc_trt.operators.schema import Operator, Tensor
from kvc_trt.operators.shapes import Layout, count_to
from kvc_trt.operators.tensors import CAPACITY
from kvc_trt.operators.turns.extend_attention import (
    EXTEND_ATTENTION,
    STORED_BEFORE,
    TURN_KEYS,
    TURN_QUERIES,
    TURN_VALUES,
    write_extend,
)

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcExtendSlidingAttention: `cache_lengths` [B] counts all tokens ever stored."""
    window = emit.attribute(CAPACITY.name)
    stored = emit.Min("cache_lengths", window)
    return write_extend(emit, layout, stored, partial(_too_old, window=window, stored=stored))


def _too_old(emit: Emitter, places: Value, end: Value, *, window: Value, stored: Value) -> Value:
    """Return which of the first `end` entries the queries at `places` [b] of a turn do not see: [B,1,1,b,end]."""
    before, used = (emit.Reshape(counts, [-1, 1, 1, 1, 1]) for counts in ("cache_lengths", stored))
    entries = count_to(emit, end)
    # Places are counted from the turn's first token. Slot s holds the last token whose number is s modulo the window.
    in_ring = emit.Sub(-1, emit.Mod(emit.Sub(emit.Sub(before, 1), entries), window))
    place = emit.Where(emit.Less(entries, used), in_ring, emit.Sub(entries, used))
    return str(emit.LessOrEqual(place, emit.Sub(emit.Unsqueeze(places, [1]), window)))


EXTEND_SLIDING_ATTENTION = Operator(
    name="KvcExtendSlidingAttention",
    summary="Exact attention of a turn's tokens to a ring and each other, in which each sees the last ones alone.",
    inputs=(
        TURN_QUERIES,
        TURN_KEYS,
        TURN_VALUES,
        Tensor(STORED_BEFORE.name, STORED_BEFORE.element, STORED_BEFORE.shape, "tokens ever stored before"),
    ),
    outputs=EXTEND_ATTENTION.outputs,
    attributes=(CAPACITY,),
    write=_write,
    attends=True,
    stores=True,
    native=False,
)
