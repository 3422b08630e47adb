"""KvcDenseAttention: append one token, attend to every entry.

Used by `full`, by skipped layers and by policies that only evict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.append import Place
from kvc_trt.operators.attention.attend import attend_first, attend_slots, group_query, ungroup
from kvc_trt.operators.dimensions import INT32_MAX
from kvc_trt.operators.schema import Attribute, Kernel, Operator
from kvc_trt.operators.shapes import Layout, scalar, size
from kvc_trt.operators.tensors import CACHE_LENGTHS, K_CACHE, OUTPUT, STEP, V_CACHE, updated
from kvc_trt.operators.vectors import NEW

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcDenseAttention.

    It attends to a slice of the cache if that is faster (less than half of the cache is in use), and for at most
    `dense_until` entries: up to there a sparse engine attends densely to the same slice, so the two agree bit for bit.
    Otherwise it reads the cache in place, unless that is stored in a format: then it widens the entries in use.
    """
    shape = layout.shape
    place = Place(emit, "cache_lengths", shape)
    tables = place.store(NEW.stored_at_once(emit, layout), layout)
    lengths = emit.Add(place.slots, 1)
    longest = emit.ReduceMax(lengths, keepdims=0)
    query = group_query(emit, "query", layout)

    def sliced(branch: Emitter) -> list[Value]:
        return [attend_first(branch, query, tables, lengths, longest)]

    def in_place(branch: Emitter) -> list[Value]:
        return [attend_slots(branch, query, *tables.read(branch), lengths)]

    if tables.keys.format is not None:
        # In a branch, as sparse engines have it: elsewhere ONNX Runtime would scale products, not the query.
        occupied = emit.Greater(longest, 0)
        attended = emit.choose(occupied, sliced, lambda branch: [str(branch.Identity(query.scaled))], outputs=1)
    else:
        mostly_empty = emit.Less(emit.Mul(longest, 2), scalar(emit, size(emit, tables.keys.parts[0], 2)))
        short = emit.LessOrEqual(longest, emit.attribute("dense_until"))
        attended = emit.choose(emit.Or(mostly_empty, short), sliced, in_place, outputs=1)
    output = ungroup(emit, attended, "query", shape)
    return {"output": output, **tables.named(updated(K_CACHE), updated(V_CACHE))}


DENSE_ATTENTION = Operator(
    name="KvcDenseAttention",
    summary="Append one token, attend to every entry.",
    inputs=(*STEP, CACHE_LENGTHS),
    outputs=(OUTPUT, updated(K_CACHE), updated(V_CACHE)),
    attributes=(
        Attribute("dense_until", 0, INT32_MAX, "entries up to which the body attends to a slice of the cache"),
    ),
    write=_write,
    attends=True,
    stores=True,
    # dense_until chooses between the body's two ways to read the cache; the kernel needs only one.
    kernel=Kernel("kvc_dense_attention", "KvcDenseAttentionParams", ignored=("dense_until",)),
)
