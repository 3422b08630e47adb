"""What stays of a prompt, in the slots of a cache: `capacity`, an attribute of the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.shapes import one, size

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def into_slots(emit: Emitter, rows: Value, stored: Value) -> Value:
    """`rows` [B,G,n,D] in a cache of `capacity` slots, zero wherever nothing is `stored`."""
    zero = emit.CastLike(0.0, rows)
    return pad_end(emit, emit.Where(stored, rows, zero), emit.attribute("capacity"), zero)


def pad_end(emit: Emitter, rows: Value, length: Value, fill: Value | np.generic) -> Value:
    """Lengthen axis 2 of `rows` to `length` (scalar)."""
    missing = emit.Sub(one(emit, length), size(emit, rows, 2))
    return str(emit.Pad(rows, emit.Concat([0], missing, axis=0), fill, [2]))
