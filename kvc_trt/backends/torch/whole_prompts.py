"""Store whole prompts in caches of any format, with room for later tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvc_trt.kernels.ops import operation
from kvc_trt.kernels.stored_parts import StoredTables
from kvc_trt.operators.turns.append_block import APPEND_BLOCK

if TYPE_CHECKING:
    from kvc_trt.models.cache_formats import CacheFormat


def store_whole(
    keys: Tensor, values: Tensor, prompt_lengths: Tensor, capacity: int, form: CacheFormat
) -> tuple[Tensor, ...]:
    """Store whole prompts, keys and values [B,G,S,D] of lengths [B], in caches of `capacity` slots; padding is zero.

    Returns the parts of keys, then those of values.
    """
    shape = *keys.shape[:2], capacity
    nothing = StoredTables.of(keys[:, :, :0], values[:, :, :0], form)
    caches = nothing.map(lambda part: part.new_zeros(*shape, part.shape[3])).parts
    if form.keys is not None:
        operation(APPEND_BLOCK, form)(keys, values, *caches, torch.zeros_like(prompt_lengths), prompt_lengths)
        return caches
    length = keys.shape[2]
    padding = (torch.arange(length, device=keys.device) >= prompt_lengths[:, None])[:, None, :, None]
    for cache, table in zip(caches, (keys, values), strict=True):
        cache[:, :, :length] = table
        cache[:, :, :length].masked_fill_(padding, 0)
    return caches
