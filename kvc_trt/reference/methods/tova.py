"""TOVA: drop the cached entry that the newest query attends to least (arXiv 2401.06104, section 3).

A layer has one list: an entry's score is the newest query's attention probability for it, summed over all query heads
of the layer. Scores are not carried from step to step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.cache import Selection
from kvc_trt.reference.compaction import Compacted
from kvc_trt.reference.dense import attend, check_cache
from kvc_trt.reference.kept import check_prompts, everything, gather_kept
from kvc_trt.reference.methods.heavy_hitters import stay
from kvc_trt.reference.selection import dot_products, sum_in_order


def keep_attended(
    queries: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, *, heavy: int, recent: int
) -> Compacted:
    """Keep the last `recent` tokens and the `heavy` others that the last query attends to most.

    queries [B,H,W,D] after RoPE, of which the last row is the last token's; keys, values [B,G,S,D] after RoPE;
    prompt_lengths [B], each in 1..S. All KV heads keep the same positions. A prompt of at most heavy + recent tokens
    keeps them all.
    """
    rows = check_prompts(keys, values, prompt_lengths)
    batch, heads, length, size = keys.shape
    expected = f"[B={batch},H,W,D={size}] of {keys.dtype}"
    checks.tensor("queries", queries, expected, batch, None, None, size, dtype=keys.dtype)
    checks.group_size(queries.shape[1], heads, "queries", queries.shape)
    checks.number("the window (queries.shape[2])", queries.shape[2], 1)
    _check_shares(heavy, recent)
    chosen = []
    for b, n in enumerate(rows):
        if n <= heavy + recent:
            chosen.append(everything(keys, n))
            continue
        score = layer_score(queries[b, :, -1], keys[b, :, :n])
        chosen.append(stay(score.expand(heads, n), heavy=heavy, recent=recent))
    return gather_kept(keys, values, chosen, min(heavy + recent, length))


def tova_attention(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, heavy: int, recent: int
) -> Selection:
    """One step over a cache that already holds the current token: attend to all entries, then drop the least attended.

    query [B,H,D]; keys, values [B,G,C,D], entries in the order of the text; lengths [B]. `kept` are the slots that
    stay, at most heavy + recent, the same for all KV heads; the last `recent` entries are never dropped.
    """
    rows = check_cache(query, keys, values, lengths)
    _check_shares(heavy, recent)
    output, kept = torch.empty_like(query), []
    for b, m in enumerate(rows):
        output[b] = attend(query[b], keys[b, :, :m], values[b, :, :m])
        score = layer_score(query[b], keys[b, :, :m])
        kept.append(stay(score.expand(keys.shape[1], m), heavy=heavy, recent=recent))
    return Selection(output, kept=kept)


def layer_score(query: Tensor, keys: Tensor) -> Tensor:
    """Sum the attention of a layer's query heads to each entry, in head order: [H,D], [G,n,D] -> [1,n]."""
    size = query.shape[1]
    grouped = query.reshape(len(keys), -1, size)
    logits = torch.cat([dot_products(heads, stored) for heads, stored in zip(grouped, keys, strict=True)])
    return sum_in_order(torch.softmax(logits / math.sqrt(size), dim=-1), 0)[None]


def _check_shares(heavy: int, recent: int) -> None:
    checks.number("heavy", heavy, 0)
    checks.number("recent", recent, 1)
