"""What a compaction leaves, in the layout of the engines' state tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CompactResult(NamedTuple):
    """What is left of a prompt's cache."""

    k_cache: Tensor
    """[B,G,C,D]; zeros past a row's end."""
    v_cache: Tensor
    bounds: Tensor
    """[B,G,2D,P]: page maxima of K, then of -K; the lowest finite value where a page is empty."""
    cache_lengths: Tensor
    """int64 [B]"""
    indices: Tensor
    """int32 [B,G,C]: ascending prompt positions, -1 past a row's end."""


def compact_shapes(
    batch: int, kv_heads: int, head_size: int, capacity: int, page_size: int
) -> tuple[tuple[tuple[int, ...], torch.dtype | None], ...]:
    """Shape and type of each field of CompactResult; None is the type of the keys."""
    cache, pages = (batch, kv_heads, capacity, head_size), -(-capacity // page_size)
    return (
        (cache, None),
        (cache, None),
        ((batch, kv_heads, 2 * head_size, pages), None),
        ((batch,), torch.int64),
        ((batch, kv_heads, capacity), torch.int32),
    )
