"""Bounds of pages made anew from the stored keys, after the last tokens of a row were taken back."""

from __future__ import annotations

import torch
from torch import Tensor


def rebuild_bounds(keys: Tensor, bounds: Tensor, dropped: range, page_size: int) -> None:
    """Make the bounds [G,2D,P] of one row anew, in place, after the last slots `dropped` of its `keys` [G,C,D].

    Empty pages hold the lowest finite value.
    """
    first, end = dropped.start // page_size, -(-dropped.stop // page_size)
    bounds[:, :, first:end] = torch.finfo(bounds.dtype).min
    stored = keys[:, first * page_size : dropped.start]
    if stored.shape[1]:
        bounds[:, :, first] = torch.cat([stored, -stored], dim=2).amax(dim=1)
