"""Attention over prompts whose softmax has a cap or sinks, which no fused kernel of PyTorch has."""

from __future__ import annotations

import torch
from torch import Tensor

from kvc_trt.reference.softmax import Softmax

BLOCK = 128
"""The number of queries that attend together, whose scores are held in memory at once."""


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return logits of any shape under the soft cap `cap`; unchanged if it is None."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def shaped_attention(query: Tensor, keys: Tensor, values: Tensor, *, softmax: Softmax, window: int | None) -> Tensor:
    """Attend like `prefill_attention`: [B,H,n,D], [B,G,S,D], [B,G,S,D] -> [B,H,n,D], with scores in float32.

    With a `window`, each token sees only that many tokens, including itself.
    """
    batch, heads, count, size = query.shape
    groups, entries = keys.shape[1], keys.shape[2]
    before, places = entries - count, torch.arange(entries, device=query.device)
    grouped = (query.float() / size**0.5).reshape(batch, groups, heads // groups, count, size)
    output = torch.empty_like(query)
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        seen = slice(0 if window is None else max(0, before + start + 1 - window), before + end)
        logits = capped(grouped[:, :, :, start:end] @ keys[:, :, None, seen].float().transpose(-1, -2), softmax.cap)
        age = places[before + start : before + end, None] - places[seen]
        hidden = (age < 0) if window is None else (age < 0) | (age >= window)
        by_head = logits.masked_fill_(hidden, -torch.inf).movedim(0, 2)
        weights = softmax.probabilities(by_head).movedim(2, 0)
        attended = weights @ values[:, :, None, seen].float()
        output[:, :, start:end] = attended.reshape(batch, heads, end - start, size).to(query.dtype)
    return output
