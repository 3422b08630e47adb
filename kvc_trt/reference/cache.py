"""The reference's caches, and the result of one step of a method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from kvc_trt.reference.linear import LinearState
from kvc_trt.reference.selection import gather_rows
from kvc_trt.reference.softmax import PLAIN, Softmax


@dataclass
class LayerCache:
    """The cache of one group of KV heads: C slots per row, of which the first lengths[b] are in use."""

    keys: Tensor
    """[B,G,C,D], after RoPE at the logical positions; before RoPE if positions count entries of the cache."""
    values: Tensor
    lengths: Tensor
    """int64 [B]: slots in use."""
    page_min: Tensor | None = None
    """[B,G,P,D] if the policy selects by pages, otherwise None; the same for `page_max`."""
    page_max: Tensor | None = None
    indices: Tensor | None = None
    """int32 [B,G,n]: the prompt positions that compaction kept, -1 past a row's end."""
    scores: Tensor | None = None
    """[B,G,C]: attention that each entry has received, if the policy evicts by it."""
    positions: Tensor | None = None
    """int64 [B,G,C]: the logical position of each entry."""
    whole: LayerCache | None = None
    """Every token by position, if the policy keeps them beside the cache that a step reads."""
    selected: Tensor | None = None
    """int32 [B,G,k] (or one list per query head): the slots read by the latest step; None if it read all."""
    budgets: list[int] | None = None
    """The tokens that each row stores, if steps evict and budgets are set per prompt."""
    softmax: Softmax = PLAIN
    """The softmax that the attention of the layer's heads applies to its logits."""

    def row(self, b: int) -> LayerCache:
        """Return one row, with all state that a step reads, as views."""
        one = slice(b, b + 1)
        scores = None if self.scores is None else self.scores[one]
        return LayerCache(self.keys[one], self.values[one], self.lengths[one], scores=scores, softmax=self.softmax)

    @property
    def capacity(self) -> int:
        """C: slots per row."""
        return self.keys.shape[2]

    def keep(self, row: int, kept: Tensor) -> None:
        """Drop in place every entry of one row whose slot is not in `kept`, int64 [G,m] ascending."""
        for table in (self.keys, self.values, self.scores, self.positions):
            if table is None:
                continue
            entries = table[row] if table.ndim == 4 else table[row][..., None]
            stay = gather_rows(entries, kept)
            entries.zero_()
            entries[:, : kept.shape[1]] = stay
        self.lengths[row] = kept.shape[1]


@dataclass
class ReferenceCache:
    """The state of a decoding batch, which `decode` updates in place."""

    caches: list[LayerCache]
    """One cache per layer, several in a row if a layer's KV heads form several groups, none of a linear layer."""
    positions: Tensor
    """int64 [B]: the logical position of each row's next token."""
    linear: dict[int, LinearState] = field(default_factory=dict)
    """The state of each linear layer."""


class Selection(NamedTuple):
    """The result of one step of a method over a cache that already holds the current token."""

    output: Tensor
    """[B,H,D]"""
    selected: Tensor | None = None
    """int32 [B,G,k] (or [B,H,k]): the slots read, ascending, -1 past a row's end; None if all were read."""
    kept: list[Tensor] | None = None
    """Per row, int64 [G,m]: the slots kept, ascending; None if nothing is evicted."""
    scores: Tensor | None = None
    """[B,G,C]: the new `scores` of the cache."""
