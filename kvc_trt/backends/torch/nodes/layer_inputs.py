"""The attention inputs of a layer: many tokens of each row, or one, and their names in the graphs of caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ManyTokens:
    """The attention inputs of many tokens per row, of a prompt or a turn, in the cache's type."""

    queries: Tensor
    """[B,H,S,D]"""
    keys: Tensor
    """[B,G,S,D]"""
    values: Tensor
    plain: Callable[[], tuple[Tensor, Tensor]]
    """Makes queries [B,S,H,D] and keys [B,S,G,D] before the rotary embedding."""

    def given(self, layer: int) -> dict[str, Callable[[], Tensor]]:
        """Return the inputs by the names of `CacheGraphs`."""
        return {
            f"query_rows.{layer}": lambda: self.queries.transpose(1, 2).flatten(2),
            f"queries.{layer}": lambda: self.queries,
            f"keys.{layer}": lambda: self.keys,
            f"values.{layer}": lambda: self.values,
            f"plain_queries.{layer}": lambda: self.plain()[0],
            f"plain_keys.{layer}": lambda: self.plain()[1].transpose(1, 2),
        }


@dataclass(frozen=True)
class OneToken:
    """The attention inputs of one token per row, in the cache's type."""

    query: Tensor
    """[B,H,D]"""
    key: Tensor
    """[B,G,D]"""
    value: Tensor
    plain: Callable[[], tuple[Tensor, Tensor]]
    """Makes query and key before the rotary embedding."""

    def given(self, layer: int) -> dict[str, Callable[[], Tensor]]:
        """Return the inputs by the names of `CacheGraphs`."""
        return {
            f"query.{layer}": lambda: self.query,
            f"key.{layer}": lambda: self.key,
            f"value.{layer}": lambda: self.value,
            f"plain_query.{layer}": lambda: self.plain()[0],
            f"plain_key.{layer}": lambda: self.plain()[1],
        }
