"""The slots that the rows of a cache use in a step that evicts: all of them, or each row a number of its own.

Layer budgets that are set for each prompt (SqueezeAttention, arXiv 2404.04793) give rows of one cache different
budgets. The cache has room for the largest; `cache_capacities` says how many slots a row uses, always its first ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.schema import INT32, INT64, Tensor

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

CAPACITIES = Tensor("cache_capacities", INT32, ("B", "1", "1"), "slots that each row uses, at most C", fill=MAX_TOKENS)
RECENTS = Tensor("recents", INT64, ("B",), "last tokens of each row, which always stay")
_PASSES_OF_A_SLICE = 3
"""A slice costs three passes over its slots: they are read, written, and read again by attention."""


class StoredRows:
    """The tokens in each row of a cache after the append.

    `stored` INT64 [B,1,1,1] counts all tokens that a row has ever stored; `by_row` says that rows have capacities.
    """

    def __init__(self, emit: Emitter, stored: Value, *, by_row: bool) -> None:
        allocated = emit.attribute("capacity")
        self.stored = stored
        self.capacity: Value = own_capacities(emit, [-1, 1, 1, 1]) if by_row else allocated
        """Slots that each row uses, INT64 [B,1,1,1]; a scalar if rows are alike."""
        self.entries: Value = emit.Min(stored, self.capacity) if by_row else stored
        """INT64 [B,1,1,1]: tokens that are read, the first slots; more than the capacity where rows are alike."""
        self.longest: Value = emit.ReduceMax(self.entries, keepdims=0)
        """Scalar: the largest of `entries`."""
        self.sliced: Value = self._sliced(emit, allocated) if by_row else emit.LessOrEqual(self.longest, allocated)
        """BOOL scalar: attend to a slice, as the dense twin does. True if no row has lost a token."""

    def _sliced(self, emit: Emitter, allocated: Value) -> Value:
        """Rows that use a small part of the slots are sliced too: that reads less than all of them."""
        over = emit.ReduceMax(emit.Sub(self.stored, self.capacity), keepdims=0)
        short = emit.LessOrEqual(emit.Mul(self.longest, _PASSES_OF_A_SLICE), allocated)
        return str(emit.Or(emit.LessOrEqual(over, 0), short))


def own_capacities(emit: Emitter, shape: list[int]) -> Value:
    """Return the input `cache_capacities` as INT64 of this shape."""
    return str(emit.Reshape(emit.cast(CAPACITIES.name, np.int64), shape))


def own_recents(emit: Emitter, *, by_row: bool) -> Value:
    """Return the last tokens that always stay: INT64 [B,1,1], a scalar where rows are alike."""
    return str(emit.Reshape(RECENTS.name, [-1, 1, 1])) if by_row else emit.attribute("recent")
