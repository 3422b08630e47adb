"""Bounds of the pages of one row: raised by a turn's keys, made anew after the row's last tokens were taken back."""

from __future__ import annotations

import torch
from torch import Tensor

from kvc_trt.reference.bounds import LARGEST_FP8, fp8_codes


def raise_bounds(keys: Tensor, bounds: Tensor, stored: int, page_size: int) -> None:
    """Let the bounds [G,2D,P] of one row cover `keys` [G,n,D] in the slots from `stored` on, in place."""
    columns = keys.transpose(1, 2)
    columns = torch.cat([columns, -columns], dim=1)
    pages = torch.arange(stored, stored + keys.shape[1], device=keys.device) // page_size
    if bounds.dtype != torch.int8:
        bounds.scatter_reduce_(2, pages.expand_as(columns), columns, "amax")
        return
    values = bounds.contiguous().view(torch.float8_e5m2).float()
    values.scatter_reduce_(2, pages.expand_as(columns), columns.float(), "amax")
    bounds.copy_(fp8_codes(values))


def stays_in_page(dropped: range, page_size: int) -> slice:
    """Return the slots that stay of the page in which the first of the last slots, `dropped`, is."""
    return slice(dropped.start // page_size * page_size, dropped.start)


def rebuild_bounds(staying: Tensor, bounds: Tensor, dropped: range, page_size: int) -> None:
    """Make the bounds [G,2D,P] of one row anew, in place, after its last slots `dropped`.

    `staying` [G,n,D] are the keys of `stays_in_page` as they are read. Empty pages hold the lowest finite value.
    """
    fp8 = bounds.dtype == torch.int8
    first, end = dropped.start // page_size, -(-dropped.stop // page_size)
    lowest = -LARGEST_FP8 if fp8 else torch.finfo(staying.dtype).min
    made = staying.new_full((*bounds.shape[:2], end - first), lowest)
    if staying.shape[1]:
        made[:, :, 0] = torch.cat([staying, -staying], dim=2).amax(dim=1)
    bounds[:, :, first:end] = fp8_codes(made.float()) if fp8 else made
