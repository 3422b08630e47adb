"""Attention over whole prompts, and the queries of a prompt that compaction observes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvc_trt.backends.torch.memory import PLAN_BUCKET, TURN_BLOCK

QUERY_BLOCKS = 4
"""The number of blocks of tokens whose queries attend together: 32,768 queries on a GPU."""
SLIDING_BLOCK = 1024
"""The queries of a sliding layer that attend together; their mask has a row for each, as long as block and window."""


def prefill_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Exact causal attention from the last n of S tokens of prompts: [B,H,n,D], [B,G,S,D], [B,G,S,D] -> [B,H,n,D].

    On a GPU only kernels without S x S scores may run: these would need 64 GB for a prompt of 32K tokens.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if query.shape[2] < keys.shape[2]:
        rows, count, entries = len(query), query.shape[2], keys.shape[2]
        return turn_attention(query, keys, values, [entries - count] * rows, [count] * rows)
    if query.device.type == "cpu":
        return scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    if query.dtype == torch.float32:  # flash kernels need 16-bit types, and this one needs equal heads
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return scaled_dot_product_attention(query, keys, values, is_causal=True)
    length = query.shape[2]
    query, keys, values = (bucketed(table) for table in (query, keys, values))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        return scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)[:, :, :length]


def sliding_attention(query: Tensor, keys: Tensor, values: Tensor, *, window: int) -> Tensor:
    """Attend like `prefill_attention`, but each token sees only the last `window` tokens, including itself."""
    from torch.nn.functional import scaled_dot_product_attention

    entries, before = keys.shape[2], keys.shape[2] - query.shape[2]
    places, found = torch.arange(entries, device=query.device), []
    for start in range(before, entries, SLIDING_BLOCK):
        end = min(start + SLIDING_BLOCK, entries)
        seen = slice(max(0, start + 1 - window), end)
        age = places[start:end, None] - places[seen]
        own = query[:, :, start - before : end - before], keys[:, :, seen], values[:, :, seen]
        found.append(scaled_dot_product_attention(*own, attn_mask=(age >= 0) & (age < window), enable_gqa=True))
    return torch.cat(found, dim=2)


def queries_at_once(tables: Tensor, block: int) -> int:
    """Return the number of a prompt's queries that attend together, for products over `block` tokens.

    A prompt of at most this length runs on any kernel that PyTorch has for whole prompts; the later queries of a longer
    one run on the flash kernel. On a GPU all queries attend together if that is better for tensors like `tables`: in
    float32, because no kernel takes later queries without storing their scores, and where PyTorch prefers cuDNN, which
    only takes whole prompts.
    """
    whole = tables.device.type == "cuda" and (tables.dtype == torch.float32 or _cudnn_is_preferred(tables.device))
    return sys.maxsize if whole else QUERY_BLOCKS * block


def _cudnn_is_preferred(device: torch.device) -> bool:
    """Return whether the GPU is a Hopper or a data-centre Blackwell, on which PyTorch prefers a new cuDNN to flash."""
    return torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def bucketed(table: Tensor) -> Tensor:
    """Pad [B,H,S,D] with zeros to a multiple of PLAN_BUCKET tokens, which causal attention before them does not see.

    cuDNN plans each new shape anew; prompts of one bucket share a plan.
    """
    missing = -table.shape[2] % PLAN_BUCKET
    return pad(table, (0, 0, 0, missing)) if missing else table  # pad copies even where nothing is missing


def turn_attention(
    query: Tensor, keys: Tensor, values: Tensor, stored: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Exact attention from new tokens to all entries before and to themselves: [B,H,M,D], [B,G,S,D] -> [B,H,M,D].

    Row b has `stored[b]` entries and then its `lengths[b]` new tokens; the rest is padding, whose results have no
    meaning. A flash kernel takes rows of equal numbers at once, without a mask, and others one by one. On a CPU and in
    float32, blocks of all rows' queries have a mask each, so that no mask of M x S is needed.
    """
    if query.device.type == "cuda" and query.dtype != torch.float32:
        return _by_flash(query, keys, values, stored, lengths)
    from torch.nn.functional import scaled_dot_product_attention

    entries = max(stored) + max(lengths)
    # Rows of equal numbers share a mask: in a prefill one for all.
    before = torch.tensor(stored[:1] if len(set(stored)) == 1 else stored, device=query.device)[:, None, None]
    places = torch.arange(entries, device=query.device)
    found = []
    for first in range(0, query.shape[2], TURN_BLOCK):
        own = query[:, :, first : first + TURN_BLOCK]
        end = min(entries, max(stored) + first + own.shape[2])
        seen = places[:end] <= before + places[first : first + own.shape[2], None]
        tables = keys[:, :, :end], values[:, :, :end]
        found.append(scaled_dot_product_attention(own, *tables, attn_mask=seen[:, None], enable_gqa=True))
    return torch.cat(found, dim=2)


def _by_flash(query: Tensor, keys: Tensor, values: Tensor, stored: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Compute a turn's attention with flash kernels: rows of equal lengths at once, others one by one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    rows = [slice(b, b + 1) for b in range(len(query))]
    if len(set(stored)) == len(set(lengths)) == 1:
        rows = [slice(None)]
    attended = torch.zeros_like(query)
    for row, before, count in zip(rows, stored, lengths, strict=False):
        end = before + count
        mask: Any = causal_lower_right(count, end)
        given = query[row, :, :count], keys[row, :, :end], values[row, :, :end]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attended[row, :, :count] = scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True)
    return attended


def last_queries(query: Tensor, prompt_lengths: Tensor, window: int) -> Tensor:
    """Gather each row's last W queries, query i at max(0, n-W+i): [B,H,S,D] -> [B,H,W,D]."""
    offsets = torch.arange(window, device=query.device) - window
    index = (prompt_lengths[:, None] + offsets).clamp(min=0)
    return query.gather(2, index[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
