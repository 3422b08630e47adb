"""KvcCompactRing: after a turn, the sinks and the last tokens, each in the slot where decode steps would have put it.

Source: StreamingLLM (arXiv 2309.17453), section 3; exact rule in docs/policies/. The ring itself is in
`attention/recent_attention.py`. In KvcCompactRingByRow each row's ring has a length of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.attention.recent_attention import SINKS
from kvc_trt.operators.attention.stored_rows import CAPACITIES, own_capacities
from kvc_trt.operators.schema import INT64, Operator, Tensor
from kvc_trt.operators.shapes import Layout
from kvc_trt.operators.tensors import CAPACITY, K_CACHE, V_CACHE
from kvc_trt.operators.turns.append_block import LENGTHS
from kvc_trt.operators.turns.extend_attention import TURN_KEYS, TURN_VALUES
from kvc_trt.operators.vectors import stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout, *, by_row: bool = False) -> Mapping[str, Value]:
    """Write the body of KvcCompactRing.

    `cache_lengths` counts all tokens ever stored, and numbers them. The last token of a slot's number modulo the
    ring's length is the one that the slot holds; new tokens follow the slots in use in k and v.
    """
    allocated, sinks = emit.attribute("capacity"), emit.attribute("sinks")
    capacity = own_capacities(emit, [-1, 1]) if by_row else allocated
    slots, ring = emit.Range(0, allocated, 1), emit.Sub(capacity, sinks)
    before = emit.Reshape("cache_lengths", [-1, 1])
    after = emit.Add(before, emit.Reshape("lengths", [-1, 1]))
    newest = emit.Sub(after, 1)
    turned = emit.Sub(newest, emit.Mod(emit.Sub(newest, slots), ring))
    number = emit.Where(emit.And(emit.GreaterOrEqual(slots, sinks), emit.GreaterOrEqual(turned, slots)), turned, slots)
    is_new = emit.GreaterOrEqual(number, before)
    place = emit.Where(is_new, emit.Add(emit.Sub(number, before), emit.Min(before, capacity)), slots)
    used = emit.Less(slots, emit.Min(after, capacity))
    occupied = emit.Unsqueeze(used, [1, 3])
    inside = emit.Where(used, place, 0)
    index = emit.Expand(
        emit.Unsqueeze(inside, [1, 3]), emit.Concat([1], emit.Shape("k", start=1, end=2), [1, 1], axis=0)
    )

    def held(part: Value) -> Value:
        rows = emit.GatherND(part, index, batch_dims=2)
        return str(emit.Where(occupied, rows, emit.CastLike(np.float32(0), part)))

    return stored_tables(layout, TURN_KEYS, TURN_VALUES).map(held).named(K_CACHE, V_CACHE)


COMPACT_RING = Operator(
    name="KvcCompactRing",
    summary="Keep the first tokens and the last ones after a turn.",
    inputs=(TURN_KEYS, TURN_VALUES, Tensor("cache_lengths", INT64, ("B",), "tokens ever stored before"), LENGTHS),
    outputs=(K_CACHE, V_CACHE),
    attributes=(CAPACITY, SINKS),
    formulas={"C": "capacity"},
    write=_write,
    stores=True,
    native=False,
)


COMPACT_RING_BY_ROW = replace(
    COMPACT_RING,
    name="KvcCompactRingByRow",
    summary="KvcCompactRing with a ring of its own length for each row.",
    inputs=(*COMPACT_RING.inputs, CAPACITIES),
    write=partial(_write, by_row=True),
)
