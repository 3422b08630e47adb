"""Quest: which pages each query head reads in one decode step (arXiv 2406.10774, algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.dense import attend, check_cache
from kvc_trt.reference.selection import best
from kvc_trt.reference.softmax import PLAIN, Softmax


def quest_attention(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, page_min: Tensor, page_max: Tensor, *,
    page_size: int, top_k: int, token_budget: int = 0, dense_until: int | None = None, softmax: Softmax = PLAIN,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step over a cache that already holds the current token.

    query [B,H,D]; keys, values [B,G,C,D]; lengths [B]; page_min, page_max [B,G,P,D]. Each query head reads the newest
    page and the best others, `top_k` div `page_size` pages in all. Returns output [B,H,D] and selected int32 [B,H,k],
    ascending, -1 where a row has fewer; rows of at most max(token_budget, dense_until) tokens read all of them.
    The layer's `softmax` is that of attention alone: a cap is monotone, and does not change which bound is larger.
    """
    rows = check_cache(query, keys, values, lengths)
    checks.number("page_size", page_size, 1)
    checks.number("top_k", top_k, page_size)
    shape = (*keys.shape[:2], -(-keys.shape[2] // page_size), keys.shape[3])
    for name, bounds in (("page_min", page_min), ("page_max", page_max)):
        checks.tensor(name, bounds, f"{list(shape)} of {query.dtype}", *shape, dtype=query.dtype)
    pages = top_k // page_size
    dense_limit = max(token_budget, dense_until or 0)
    width = max(pages * page_size, dense_limit)
    selected = torch.full((*query.shape[:2], width), -1, dtype=torch.int32, device=query.device)
    output = torch.empty_like(query)
    group = query.shape[1] // keys.shape[1]
    for b, m in enumerate(rows):
        if m <= width:
            output[b] = attend(query[b], keys[b, :, :m], values[b, :, :m], softmax)
            selected[b, :, :m] = torch.arange(m, device=query.device)
            continue
        scores = page_scores(query[b], m, page_min[b], page_max[b], page_size=page_size)
        for head, of_head in enumerate(scores):
            tokens = _tokens(of_head, pages, page_size, m)
            kv = head // group
            entries, own = (keys[b, kv, None, tokens], values[b, kv, None, tokens]), softmax.of_heads([head])
            output[b, head] = attend(query[b, head, None], *entries, own)[0]
            selected[b, head, : len(tokens)] = tokens
    return output, selected


def page_scores(query: Tensor, length: int, page_min: Tensor, page_max: Tensor, *, page_size: int) -> Tensor:
    """Bound the score of any key within a page: query [H,D], page_min, page_max [G,P,D] -> [H,pages in use]."""
    pages = -(-length // page_size)
    heads = query.reshape(page_min.shape[0], -1, 1, query.shape[-1])
    low, high = page_min[:, None, :pages], page_max[:, None, :pages]
    return torch.maximum(heads * low, heads * high).sum(dim=-1).flatten(0, 1)


def _tokens(scores: Tensor, pages: int, page_size: int, length: int) -> Tensor:
    """Return the tokens of one head's best pages, ascending; the newest page is always read."""
    ranked = scores.clone()
    ranked[-1] = torch.inf
    chosen = best(ranked, pages).sort().values
    tokens = (chosen[:, None] * page_size + torch.arange(page_size, device=scores.device)).flatten()
    return tokens[tokens < length]
