"""A turn in PyTorch: attention to stored and new tokens, then the append of the new ones or the compaction of both.

All rows of a batch run together. Their new tokens are padded on the right, and each row has its own numbers of stored
and new tokens, which the host knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvc_trt.backends.torch.model.prompt_attention import last_queries, turn_attention
from kvc_trt.kernels.ops import numbers_of, operation
from kvc_trt.kernels.stored_parts import StoredTables, names_of
from kvc_trt.operators.compaction.compact import COMPACT_TURN
from kvc_trt.operators.turns.append_block import APPEND_BLOCK, RAISE_BOUNDS
from kvc_trt.operators.turns.join_block import JOIN_BLOCK

if TYPE_CHECKING:
    from kvc_trt.methods.base.parameters import PolicyParameters


def take_turns(
    layer: int, made: tuple[Tensor, Tensor, Tensor], lengths: Sequence[int], positions: Tensor,
    stored: Sequence[int], state: Mapping[str, Tensor], rule: PolicyParameters,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Attend from the new tokens of all rows in one layer and store them in place.

    `made` are their queries [B,M,H,D], keys and values [B,M,G,D], padded on the right to M; `positions` [B] those of
    the first ones, `stored` the entries of each row before the turn; `dtype` is the cache's type. Returns [B,H,M,D], of
    any values for padding, and the entries [B] after the turn.
    """
    query, keys, values = (part.transpose(1, 2) for part in made)
    own = {name.partition(".")[0]: tensor for name, tensor in state.items() if name.endswith(f".{layer}")}
    turn = LayerTurn(query, keys.to(dtype), values.to(dtype), own, lengths, stored, positions, rule)
    joined_keys, joined_values = (table.to(query.dtype) for table in turn.joined.read())
    attended = turn_attention(query, joined_keys, joined_values, turn.stored, turn.lengths)
    return attended, [turn.compact() if rule.evicts_on_turns else turn.append()]


@dataclass(frozen=True)
class LayerTurn:
    """The new tokens of all rows in one layer, and the rows' caches, which are updated in place."""

    query: Tensor
    """[B,H,M,D]"""
    keys: Tensor
    """[B,G,M,D]"""
    values: Tensor
    state: Mapping[str, Tensor]
    """The state tensors of the layer, by kind: the parts of keys and values [B,G,C,.], bounds, slot_positions."""
    lengths: Sequence[int]
    """The number of new tokens of each row."""
    stored: Sequence[int]
    """The number of entries of each row before the turn."""
    positions: Tensor
    """The logical position of each row's first new token, INT64 [B]."""
    rule: PolicyParameters

    @cached_property
    def joined(self) -> StoredTables:
        """The stored tokens of each row, then its new ones, in slots of their own; [B,G,m+M,.] for the largest m."""
        most = max(1, *self.stored)
        caches = (self.state[name][:, :, :most] for name in self._parts)
        *parts, _ = operation(JOIN_BLOCK, self.rule.cache_format)(self.keys, self.values, *caches, *self._counts)
        keys = len(names_of(self.rule.cache_format)[0])
        return StoredTables(self.rule.cache_format, tuple(parts[:keys]), tuple(parts[keys:]))

    def append(self) -> Tensor:
        """Store the new tokens behind the others and raise the bounds of their pages; return the new lengths."""
        form, (stored, lengths) = self.rule.cache_format, self._counts
        operation(APPEND_BLOCK, form)(
            self.keys, self.values, *(self.state[name] for name in self._parts), stored, lengths
        )
        if "bounds" in self.state:
            numbers = numbers_of(RAISE_BOUNDS, self.rule)
            operation(RAISE_BOUNDS, form)(self.keys, self.state["bounds"], stored, lengths, **numbers)
        return stored + lengths

    def compact(self) -> Tensor:
        """Keep the stored and new entries with the most votes of the turn's last queries; return the new lengths."""
        stored, lengths = self._counts
        numbers = numbers_of(COMPACT_TURN, self.rule)
        if "bounds" not in self.state:
            numbers["page_size"] = self.rule.capacity  # one page, since the bounds are not used
        window = last_queries(self.query, lengths, self.rule.window).to(self.keys.dtype)
        rows = window, *self.joined.parts, stored + lengths, lengths.clamp(max=self.rule.window)
        compact = operation(COMPACT_TURN, self.rule.cache_format)
        *parts, bounds, after, indices = compact(*rows, **numbers, **self._numbers_by_length())
        kept = dict(zip(self._parts, parts, strict=True))
        kept |= {"bounds": bounds, "slot_positions": self._positions_of(indices)}
        for name, table in self.state.items():
            table.copy_(kept[name])
        found: Tensor = after
        return found

    @property
    def _parts(self) -> list[str]:
        """The kinds of state that hold keys and values."""
        keys, values = names_of(self.rule.cache_format)
        return [*keys, *values]

    @cached_property
    def _counts(self) -> tuple[Tensor, Tensor]:
        """Stored and new tokens of each row, INT64 [B] each."""
        device = self.keys.device
        return torch.tensor(self.stored, device=device), torch.tensor(self.lengths, device=device)

    def _numbers_by_length(self) -> dict[str, Tensor]:
        """Return each row's budget and pool kernel, by the length of its text after the turn."""
        if not self.rule.by_length:
            return {}
        texts = self.positions.cpu().numpy() + np.array(self.lengths)
        budgets = self.rule.budgets_of_turns[np.minimum(texts, self.rule.max_input_len)]
        kernels = [self.rule.pool_kernel_of(text) for text in texts.tolist()]
        numbers = {"prompt_budgets": budgets.tolist(), "pool_kernels": kernels}
        return {name: torch.tensor(of_rows, device=self.keys.device) for name, of_rows in numbers.items()}

    def _positions_of(self, indices: Tensor) -> Tensor:
        """Return the logical positions INT32 [B,G,C] of kept entries; steps do not record those of the tokens that they
        append."""
        recorded, stored = self.state["slot_positions"], self._counts[0]
        chosen = indices.clamp(min=0).long()
        known = recorded.gather(2, chosen.clamp(max=recorded.shape[2] - 1))
        is_known = (chosen < stored[:, None, None]) & (known >= 0)
        counted = chosen + (self.positions - stored)[:, None, None]
        return torch.where(is_known, known, counted.int()).masked_fill(indices < 0, -1)
