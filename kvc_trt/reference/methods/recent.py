"""StreamingLLM and sliding window: keep the first and the last tokens (arXiv 2309.17453, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.cache import LayerCache
from kvc_trt.reference.compaction import Compacted


def keep_recent(keys: Tensor, values: Tensor, prompt_lengths: Tensor, *, slots: int, sinks: int) -> Compacted:
    """Keep the first `sinks` and the last `slots - sinks` tokens of every prompt longer than `slots`.

    keys, values [B,G,S,D]; prompt_lengths [B], each in 1..S.
    """
    checks.tensor("keys", keys, "[B,G,S,D]", None, None, None, None)
    checks.tensor("values", values, f"{list(keys.shape)} like keys", *keys.shape, dtype=keys.dtype)
    checks.number("slots", slots, 1)
    checks.number("sinks", sinks, 0, slots - 1)
    batch, heads, length, size = keys.shape
    width = min(slots, length)
    kept = keys.new_zeros(batch, heads, width, size), keys.new_zeros(batch, heads, width, size)
    indices = torch.full((batch, heads, width), -1, dtype=torch.int32, device=keys.device)
    for b, n in enumerate(checks.lengths("prompt_lengths", prompt_lengths, batch, 1, length)):
        index = torch.arange(n, device=keys.device)
        if n > slots:
            index = torch.cat([index[:sinks], index[n - (slots - sinks) :]])
        indices[b, :, : len(index)] = index
        for target, source in zip(kept, (keys, values), strict=True):
            target[b, :, : len(index)] = source[b, :, index]
    return Compacted(*kept, indices, prompt_lengths.clamp(max=slots))


def make_room(cache: LayerCache, *, slots: list[int], sinks: int) -> None:
    """Drop the oldest entry that is not a sink from every full row, in place, to make room for the next token.

    `slots` are those that each row uses.
    """
    for row, (entries, used) in enumerate(zip(cache.lengths.tolist(), slots, strict=True)):
        if entries == used:
            index = torch.arange(used, device=cache.keys.device)
            cache.keep(row, index[index != sinks].expand(cache.keys.shape[1], -1))
