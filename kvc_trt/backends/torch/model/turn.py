"""A turn of one row in PyTorch: attention to stored and new tokens, then the append or the compaction of both.

Rows of a batch are taken one by one: each has its own lengths, which the host knows. Compaction is that of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvc_trt.backends.torch.model.bounds import raise_bounds
from kvc_trt.kernels.ops import kvc, numbers_of
from kvc_trt.operators.compaction.compact import COMPACT

if TYPE_CHECKING:
    from kvc_trt.methods.base.parameters import PolicyParameters


def take_turns(
    layer: int, made: tuple[Tensor, Tensor, Tensor], lengths: Sequence[int], positions: Tensor,
    cache_lengths: Sequence[Sequence[int]], state: Mapping[str, Tensor], rule: PolicyParameters,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Attend from the new tokens of each row in one layer and store them in place.

    `made` are their queries [B,M,H,D], keys and values [B,M,G,D], padded on the right to M; `positions` [B] those of
    the first ones. Returns [B,H,M,D], zeros for padding, and the entries [B] after the turn.
    """
    query, keys, values = (part.transpose(1, 2) for part in made)
    attended, after = torch.zeros_like(query), []
    for b, (n, position) in enumerate(zip(lengths, positions.tolist(), strict=True)):
        own = _row_of(state, layer, b)
        dtype = own["k_cache"].dtype
        new = query[b, :, :n], keys[b, :, :n].to(dtype), values[b, :, :n].to(dtype)
        row = TurnRow(*new, own, cache_lengths[layer][b], position)
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
        places = torch.arange(keys.shape[1], device=keys.device)
        seen = places <= places[self.stored :, None]
        query, keys, values = (table[None].to(self.query.dtype) for table in (self.query, keys, values))
        return scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)[0]

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
        window = self.query[:, -min(rule.window, self.count) :].to(keys.dtype)
        lengths = torch.tensor([keys.shape[1]], device=keys.device)
        tables = (table[None].contiguous() for table in (window, keys, values))
        k_cache, v_cache, bounds, after, indices = kvc.compact(*tables, lengths, **numbers)
        positions = self._positions(indices[0])
        kept = {"k_cache": k_cache[0], "v_cache": v_cache[0], "bounds": bounds[0], "slot_positions": positions}
        for name, table in self.state.items():
            table.copy_(kept[name])
        return int(after[0])

    def _positions(self, indices: Tensor) -> Tensor:
        """Return the logical positions INT32 [G,C] of kept entries; steps do not record those of what they append."""
        recorded = self.state["slot_positions"][:, : self.stored]
        places = torch.arange(self.stored + self.count, device=indices.device, dtype=torch.int32)
        known = (places + (self.position - self.stored)).expand(len(indices), -1).clone()
        known[:, : self.stored] = torch.where(recorded >= 0, recorded, known[:, : self.stored])
        return known.gather(1, indices.clamp(min=0).long()).masked_fill(indices < 0, -1)
