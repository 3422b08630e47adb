"""Many compressed caches of one prompt, decoded together: `benchmarks.accuracy.kvpress.answers`'s rows.

A step reads the weights once for all rows. Rows whose caches are equally long share one call of attention, which sees
the same as if they were decoded alone; so no row is padded, and nothing is masked but the future.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "rows-of-several-lengths"
ALONE = "sdpa"
"""The attention of one group of rows; kvpress has put AdaKV's masking of keys before it."""
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, fp32 [rows, heads, tokens, size]."""


@dataclass
class Rows:
    """Caches of equal length, a row for each."""

    names: tuple[Any, ...]
    """A name for each row, chosen by the caller."""
    kept: int
    """Tokens in the cache before anything is fed."""
    layers: Layers
    """Keys and values of each layer, with room behind the first `kept` for all tokens that are fed."""
    masks: Sequence[Any] | None = None
    """AdaKV's indices per layer, of a single row."""

    @staticmethod
    def empty(names: Sequence[Any], kept: int, room: int, like: Layers) -> Rows:
        """Caches to be filled with `kept` tokens, with room for as many more as `room`."""
        heads, size = like[0][0].shape[1], like[0][0].shape[3]
        shape = (len(names), heads, kept + room, size)
        return Rows(tuple(names), kept, [(torch.empty(shape), torch.empty(shape)) for _ in like])

    def fill(self, row: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put one layer's cache [1, heads, kept, size] into a row."""
        for ours, given in zip(self.layers[layer], (keys, values), strict=True):
            ours[row, :, : self.kept] = given[0]


@dataclass
class _Part:
    """The part of one layer's cache that attention reads for one group of rows."""

    keys: torch.Tensor
    values: torch.Tensor
    masks: Any


class RowsCache:
    """A cache for transformers' layers: groups of rows, in the order of the batch."""

    def __init__(self, groups: Sequence[Rows]) -> None:
        self._groups, self.fed = groups, 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, _: Any = None) -> tuple[list[_Part], None]:
        """Append the new tokens of a layer; returns the tensors that attention reads, in the place of the keys."""
        parts, first, new = [], 0, keys.shape[2]
        for group in self._groups:
            last, end = first + len(group.names), group.kept + self.fed + new
            own_keys, own_values = group.layers[layer]
            own_keys[:, :, end - new : end] = keys[first:last]
            own_values[:, :, end - new : end] = values[first:last]
            masks = None if group.masks is None else group.masks[layer]
            parts.append(_Part(own_keys[:, :, :end], own_values[:, :, :end], masks))
            first = last
        return parts, None


def _attention(
    module: Any, query: torch.Tensor, parts: list[_Part], _: None, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attend with each group of rows separately, in the batch's order."""
    found, first, new = [], 0, query.shape[2]
    for part in parts:
        last, length = first + part.keys.shape[0], part.keys.shape[2]
        future = torch.ones(new, length, dtype=torch.bool).tril(length - new)[None, None] if new > 1 else None
        module.masked_key_indices = part.masks
        own = ALL_ATTENTION_FUNCTIONS[ALONE](module, query[first:last], part.keys, part.values, future, **options)
        found.append(own[0])
        first = last
    module.masked_key_indices = None
    return torch.cat(found), None


@contextmanager
def _rows_attention(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = _attention
    model.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = before


class Decoding:
    """Rows on their way through one model, all at the position of the text."""

    def __init__(self, model: PreTrainedModel, groups: Sequence[Rows], position: int) -> None:
        self._model, self._cache, self._position = model, RowsCache(groups), position
        self.rows = sum(len(group.names) for group in groups)

    def feed(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Feed as many tokens to every row; returns the last hidden states [rows, tokens, size]."""
        count = len(tokens[0])
        places = torch.arange(self._position, self._position + count)
        with _rows_attention(self._model):
            found = self._model.model(
                torch.tensor(tokens),
                past_key_values=self._cache,
                position_ids=places.expand(self.rows, -1),
                cache_position=places,
            )
        self._position += count
        self._cache.fed += count
        hidden: torch.Tensor = found.last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the vocabulary's logits for hidden states [..., size]."""
        logits: torch.Tensor = self._model.lm_head(hidden)
        return logits
