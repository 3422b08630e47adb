"""Rebuild the page bounds of one row after its last tokens were taken back."""

from __future__ import annotations

import torch
from torch import Tensor

from kvc_trt.reference.bounds import LARGEST_FP8, fp8_codes


def stays_in_page(dropped: range, page_size: int) -> slice:
    """Return the slots before `dropped`, a row's last slots, in the page in which these begin."""
    return slice(dropped.start // page_size * page_size, dropped.start)


def rebuild_bounds(staying: Tensor, bounds: Tensor, dropped: range, page_size: int) -> None:
    """Rebuild the bounds [G,2D,P] of one row in place after its last slots, `dropped`, were taken back.

    `staying` [G,n,D] are the keys of the slots `stays_in_page`, decoded. Empty pages hold the lowest finite value.
    """
    fp8 = bounds.dtype == torch.int8
    first, end = dropped.start // page_size, -(-dropped.stop // page_size)
    lowest = -LARGEST_FP8 if fp8 else torch.finfo(staying.dtype).min
    made = staying.new_full((*bounds.shape[:2], end - first), lowest)
    if staying.shape[1]:
        made[:, :, 0] = torch.cat([staying, -staying], dim=2).amax(dim=1)
    bounds[:, :, first:end] = fp8_codes(made.float()) if fp8 else made
