"""What the reference stores between steps, and what one step of a method returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvc_trt.reference.selection import gather_rows


@dataclass
class LayerCache:
    """What the KV heads of one group store; C slots for every row, of which the first lengths[b] are in use."""

    keys: Tensor
    """[B,G,C,D], after RoPE at the logical positions (before it where the policy counts entries of the cache)."""
    values: Tensor
    lengths: Tensor
    """int64 [B]"""
    page_min: Tensor | None = None
    """[B,G,P,D] where the policy selects by pages, else None; likewise page_max."""
    page_max: Tensor | None = None
    indices: Tensor | None = None
    """int32 [B,G,.]: the prompt positions that compaction kept, -1 past a row's end."""
    scores: Tensor | None = None
    """[B,G,C]: attention that each entry has received, where the policy evicts by it."""
    positions: Tensor | None = None
    """int64 [B,G,C]: the logical position of each entry."""
    selected: Tensor | None = None
    """int32 [B,G,.] (or one list per query head): the slots read by the latest step, None where all were."""

    @property
    def capacity(self) -> int:
        """C: slots per row."""
        return self.keys.shape[2]

    def keep(self, row: int, kept: Tensor) -> None:
        """Drop every entry of one row whose slot is not in `kept`, int64 [G,m] ascending; in place."""
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
    """The state of a decoding batch. `decode` advances it in place."""

    caches: list[LayerCache]
    """One per layer; several in a row where a layer's KV heads are in several groups."""
    positions: Tensor
    """int64 [B]: the logical position of each row's next token."""


class Selection(NamedTuple):
    """One step of a method over a cache that already holds the current token."""

    output: Tensor
    """[B,H,D]"""
    selected: Tensor | None = None
    """int32 [B,G,k] (or [B,H,k]): the slots read, ascending, -1 past a row's end; None where all were."""
    kept: list[Tensor] | None = None
    """Per row, int64 [G,m]: the slots that stay, ascending; None where nothing is evicted."""
    scores: Tensor | None = None
    """[B,G,C]: the cache's new `scores`."""
