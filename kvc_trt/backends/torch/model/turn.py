"""A turn of one row in PyTorch: attention to stored and new tokens, then the append or the compaction of both.

Rows of a batch are taken one by one: each has its own lengths, which the host knows. Compaction is that of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from kvc_trt.backends.torch.model.bounds import raise_bounds
from kvc_trt.backends.torch.model.prompt_attention import turn_attention
from kvc_trt.kernels.ops import kvc, numbers_of, operation
from kvc_trt.kernels.stored_parts import StoredTables, names_of
from kvc_trt.operators.compaction.compact import COMPACT, COMPACT_TURN
from kvc_trt.operators.turns.append_block import APPEND_BLOCK
from kvc_trt.operators.turns.join_block import JOIN_BLOCK

if TYPE_CHECKING:
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.cache_formats import CacheFormat


def take_turns(
    layer: int, made: tuple[Tensor, Tensor, Tensor], lengths: Sequence[int], positions: Tensor,
    cache_lengths: Sequence[Sequence[int]], state: Mapping[str, Tensor], rule: PolicyParameters,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Attend from the new tokens of each row in one layer and store them in place.

    `made` are their queries [B,M,H,D], keys and values [B,M,G,D], padded on the right to M; `positions` [B] those of
    the first ones; `dtype` is the cache's type. Returns [B,H,M,D], zeros for padding, and the entries [B] after the
    turn.
    """
    query, keys, values = (part.transpose(1, 2) for part in made)
    attended, after = torch.zeros_like(query), []
    kind = TurnRow if rule.cache_format.keys is None else StoredTurnRow
    for b, (n, position) in enumerate(zip(lengths, positions.tolist(), strict=True)):
        new = query[b, :, :n], keys[b, :, :n].to(dtype), values[b, :, :n].to(dtype)
        row = kind(*new, _row_of(state, layer, b), cache_lengths[layer][b], position, rule.cache_format)
        tables = row.joined()
        attended[b, :, :n] = row.attend(*tables)
        after.append(row.compact(*tables, rule) if rule.evicts_on_turns else row.append(rule.page_size))
    return attended, [torch.tensor(after)]


def _row_of(state: Mapping[str, Tensor], layer: int, row: int) -> dict[str, Tensor]:
    """Return one row of each state tensor of a layer, by kind."""
    names = {name: name.partition(".")[0] for name in state if name.endswith(f".{layer}")}
    return {kind: state[name][row] for name, kind in names.items()}


@dataclass(frozen=True)
class TurnRow:
    """The new tokens of one row in one layer, and its caches, which are updated in place."""

    query: Tensor
    """[H,n,D]"""
    keys: Tensor
    """[G,n,D]"""
    values: Tensor
    state: Mapping[str, Tensor]
    """The row of each state tensor of the layer, by kind: k_cache, v_cache [G,C,D], bounds, slot_positions."""
    stored: int
    """Entries before the turn."""
    position: int
    """Logical position of the first new token."""
    form: CacheFormat

    @property
    def count(self) -> int:
        """Number of new tokens."""
        return self.keys.shape[1]

    def joined(self) -> tuple[Tensor, Tensor]:
        """Return stored and new keys and values, [G,m+n,D]."""
        keys, values = (
            torch.cat([self.state[name][:, : self.stored], new], dim=1)
            for name, new in (("k_cache", self.keys), ("v_cache", self.values))
        )
        return keys, values

    def attend(self, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from the new tokens to stored and new entries, each to those up to itself; [H,n,D]."""
        query, keys, values = (table[None].to(self.query.dtype) for table in (self.query, keys, values))
        return turn_attention(query, keys, values)[0]

    def append(self, page_size: int) -> int:
        """Store the new tokens behind the others and raise the bounds of their pages; return the new length."""
        after = self.stored + self.count
        self.state["k_cache"][:, self.stored : after] = self.keys
        self.state["v_cache"][:, self.stored : after] = self.values
        if "bounds" in self.state:
            raise_bounds(self.keys, self.state["bounds"], self.stored, page_size)
        return after

    def compact(self, keys: Tensor, values: Tensor, rule: PolicyParameters) -> int:
        """Keep of stored and new entries what the last queries of the turn vote for; return the new length."""
        numbers, text = numbers_of(COMPACT, rule), self.position + self.count
        numbers |= {"prompt_budget": rule.kept_after(text), "pool_kernel": rule.pool_kernel_of(text)}
        if "bounds" not in self.state:
            numbers["page_size"] = rule.capacity  # one page, since the bounds are not used
        window = self.query[:, -min(rule.window, self.count) :].to(self.keys.dtype)[None].contiguous()
        *parts, bounds, after, indices = self._compacted(window, keys, values, numbers)
        kept = dict(zip(self._parts, (part[0] for part in parts), strict=True))
        kept |= {"bounds": bounds[0], "slot_positions": self._positions(indices[0])}
        for name, table in self.state.items():
            table.copy_(kept[name])
        return int(after[0])

    def _compacted(self, window: Tensor, keys: Tensor, values: Tensor, numbers: Mapping[str, int]) -> Any:
        """Return the results of the compaction by the queries `window` [1,H,W,D]."""
        tables = (table[None].contiguous() for table in (keys, values))
        return kvc.compact(window, *tables, self._number(self.stored + self.count), **numbers)

    @property
    def _parts(self) -> list[str]:
        """The kinds of state that hold keys and values."""
        keys, values = names_of(self.form)
        return [*keys, *values]

    def _number(self, number: int) -> Tensor:
        """Return a number of the row, INT64 [1]."""
        return torch.tensor([number], device=self.keys.device)

    def _positions(self, indices: Tensor) -> Tensor:
        """Return the logical positions INT32 [G,C] of kept entries; steps do not record those of what they append."""
        recorded = self.state["slot_positions"][:, : self.stored]
        places = torch.arange(self.stored + self.count, device=indices.device, dtype=torch.int32)
        known = (places + (self.position - self.stored)).expand(len(indices), -1).clone()
        known[:, : self.stored] = torch.where(recorded >= 0, recorded, known[:, : self.stored])
        return known.gather(1, indices.clamp(min=0).long()).masked_fill(indices < 0, -1)


@dataclass(frozen=True)
class StoredTurnRow(TurnRow):
    """A row whose caches have a format: its new tokens are stored first, and read like the others."""

    @override
    def joined(self) -> tuple[Tensor, Tensor]:
        """Return stored and new keys and values as they are read, float32 [G,m+n,D]."""
        both = self._both.map(lambda part: part[:, :, : self.stored + self.count])
        keys, values = both.read()
        return keys[0], values[0]

    @override
    def append(self, page_size: int) -> int:
        caches, new = (self.state[name][None] for name in self._parts), (self.keys[None], self.values[None])
        operation(APPEND_BLOCK, self.form)(*new, *caches, self._number(self.stored), self._number(self.count))
        if "bounds" in self.state:
            raise_bounds(self.joined()[0][:, self.stored :], self.state["bounds"], self.stored, page_size)
        return self.stored + self.count

    @override
    def _compacted(self, window: Tensor, keys: Tensor, values: Tensor, numbers: Mapping[str, int]) -> Any:
        lengths = self._number(self.stored + self.count), self._number(window.shape[2])
        return operation(COMPACT_TURN, self.form)(window, *self._both.parts, *lengths, **numbers)

    @cached_property
    def _both(self) -> StoredTables:
        """The stored tokens, then the new ones, in slots of their own, [1,G,C+n,.]."""
        caches, new = (self.state[name][None] for name in self._parts), (self.keys[None], self.values[None])
        counts = self._number(self.stored), self._number(self.count)
        *parts, _ = operation(JOIN_BLOCK, self.form)(*new, *caches, *counts)
        keys = len(names_of(self.form)[0])
        return StoredTables(self.form, tuple(parts[:keys]), tuple(parts[keys:]))
