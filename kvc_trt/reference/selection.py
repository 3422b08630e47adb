"""Top-k with the tie rule: larger value first, then the lower index; NaN below every finite value.

Ties are frequent (max-pooling makes plateaus, pages repeat scores), so their order is part of the semantics."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_BLOCK = 16
"""Rows, columns and channels that processors compute together in a matrix product; a multiple for all processors."""


def best(scores: Tensor, k: int) -> Tensor:
    """Return the positions of the k best along the last axis, best first: scores [..., n] -> int64 [..., k]."""
    if not 0 <= k <= scores.shape[-1]:
        raise ValueError(f"scores has shape {list(scores.shape)}; cannot take k={k} of its last axis")
    ranked = torch.where(torch.isnan(scores), -torch.inf, scores)
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :k]


def best_ascending(scores: Tensor, k: int) -> Tensor:
    """Return the positions of the k best along the last axis in ascending order."""
    return best(scores, k).sort(dim=-1).values


def sum_in_order(values: Tensor, axis: int) -> Tensor:
    """Sum along an axis, lowest index first.

    torch.sum adds the last few columns of a table in another order than the rest, so equal columns could get unequal
    sums and ties would be lost."""
    return functools.reduce(torch.add, values.unbind(axis))


def dot_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply every query by every key: [R,D], [n,D] -> [R,n]; equal keys get bit-identical products.

    A matrix product adds in another order in rows and columns that do not fill a block, and the block size depends on
    the processor. So all three axes are padded with zeros to whole blocks, and the keys are the rows of the product.
    """
    padded_keys, padded_queries = (
        torch.nn.functional.pad(table, (0, -table.shape[1] % _BLOCK, 0, -table.shape[0] % _BLOCK))
        for table in (keys, queries)
    )
    return (padded_keys @ padded_queries.T)[: len(keys), : len(queries)].T


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Gather rows of every KV head by that head's list: table [G,n,D], index [G,k] -> [G,k,D]."""
    return table[torch.arange(len(table), device=table.device)[:, None], index]
