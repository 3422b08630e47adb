"""Gather the keys and values that a method keeps of prompts, once it has chosen the positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.compaction import Compacted
from kvc_trt.reference.selection import gather_rows


def check_prompts(keys: Tensor, values: Tensor, prompt_lengths: Tensor) -> list[int]:
    """Raise ValueError unless keys, values [B,G,S,D] and prompt_lengths [B] fit together; return the lengths."""
    checks.tensor("keys", keys, "[B,G,S,D]", None, None, None, None)
    checks.tensor("values", values, f"{list(keys.shape)} like keys", *keys.shape, dtype=keys.dtype)
    return checks.lengths("prompt_lengths", prompt_lengths, keys.shape[0], 1, keys.shape[2])


def gather_kept(keys: Tensor, values: Tensor, chosen: Sequence[Tensor], slots: int) -> Compacted:
    """Gather the `chosen` positions of keys and values [B,G,S,D]: int64 [G,k] ascending per row, k at most `slots`."""
    batch, heads, _, size = keys.shape
    kept = keys.new_zeros(batch, heads, slots, size), keys.new_zeros(batch, heads, slots, size)
    indices = torch.full((batch, heads, slots), -1, dtype=torch.int32, device=keys.device)
    for b, index in enumerate(chosen):
        indices[b, :, : index.shape[1]] = index
        for target, source in zip(kept, (keys, values), strict=True):
            target[b, :, : index.shape[1]] = gather_rows(source[b], index)
    return Compacted(*kept, indices, torch.tensor([index.shape[1] for index in chosen], device=keys.device))


def everything(keys: Tensor, n: int) -> Tensor:
    """Return all positions of one prompt of n tokens: int64 [G,n] for keys [B,G,S,D]."""
    return torch.arange(n, device=keys.device).expand(keys.shape[1], n)
