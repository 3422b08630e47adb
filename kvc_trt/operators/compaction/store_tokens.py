"""KvcStoreTokens: store the first tokens of a table in a cache that has a format.

Used where no operator chooses the kept tokens: by methods that keep everything, and by those that keep the first and
the last tokens. A cache of the activations' type needs no operator for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvc_trt.operators.schema import Operator
from kvc_trt.operators.shapes import Layout, count_to, into_slots, one, size
from kvc_trt.operators.tensors import CAPACITY, K_CACHE, PROMPT_KEYS, PROMPT_LENGTHS, PROMPT_VALUES, V_CACHE
from kvc_trt.operators.vectors import EXACT

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcStoreTokens; slots past a row's tokens hold zeros."""
    count = emit.Min(size(emit, "k", 2), one(emit, emit.attribute("capacity")))
    occupied = emit.Less(emit.Unsqueeze(count_to(emit, count), [1]), emit.Reshape("prompt_lengths", [-1, 1, 1, 1]))
    stored = EXACT.stored(emit, layout).map(lambda part: emit.Slice(part, [0], count, [2]))  # codes: a small copy
    return stored.map(lambda part: into_slots(emit, part, occupied)).named(K_CACHE, V_CACHE)


STORE_TOKENS = Operator(
    name="KvcStoreTokens",
    summary="Store the first tokens of every row.",
    inputs=(PROMPT_KEYS, PROMPT_VALUES, PROMPT_LENGTHS),
    outputs=(replace(K_CACHE, summary="the first tokens of k; zeros past a row's end"), V_CACHE),
    attributes=(CAPACITY,),
    formulas={"C": "capacity"},
    write=_write,
    stores=True,
    native=False,
)
