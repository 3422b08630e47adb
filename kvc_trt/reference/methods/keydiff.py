"""KeyDiff: keep the keys that differ most from the mean direction of all keys (arXiv 2504.15364, section 3).

The anchor of a KV head is the mean of its keys, each scaled to length 1. A token's score is the negative product of its
scaled key and the anchor: up to a constant factor, the negative cosine between the two. Queries are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.compaction import Compacted
from kvc_trt.reference.kept import check_prompts, everything, gather_kept
from kvc_trt.reference.selection import best_ascending

SHORTEST = 1e-12
"""Smallest length by which a key is divided, so that a key of zeros stays one."""


def keep_distinct(keys: Tensor, values: Tensor, prompt_lengths: Tensor, *, prompt_budget: int) -> Compacted:
    """Keep the `prompt_budget` most distinct tokens per KV head of every prompt longer than that, all of the others.

    keys, values [B,G,S,D], keys after RoPE; prompt_lengths [B], each in 1..S.
    """
    rows = check_prompts(keys, values, prompt_lengths)
    checks.number("prompt_budget", prompt_budget, 1)
    chosen = [
        everything(keys, n) if n <= prompt_budget else best_ascending(distinctness(keys[b, :, :n]), prompt_budget)
        for b, n in enumerate(rows)
    ]
    return gather_kept(keys, values, chosen, min(prompt_budget, keys.shape[2]))


def distinctness(keys: Tensor) -> Tensor:
    """Score every token of one prompt: [G,n,D] -> [G,n], in -1..1."""
    scaled: Tensor = keys / torch.linalg.vector_norm(keys, dim=-1, keepdim=True).clamp(min=SHORTEST)
    anchor = scaled.mean(dim=1, keepdim=True)
    return -(scaled * anchor).sum(dim=-1)
