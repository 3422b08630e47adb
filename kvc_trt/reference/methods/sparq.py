"""SparQ: the tokens that one decode step reads, and the mean that replaces the others (arXiv 2312.04985, algorithm
1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.dense import attend, check_cache
from kvc_trt.reference.methods.hybrid import temperature
from kvc_trt.reference.selection import best, best_ascending, gather_rows, sum_in_order


class SparqScores(NamedTuple):
    """The ranked values of one row, used to prove that a different choice was a near-tie."""

    channel_values: Tensor
    """[G,D]: |q| summed over the group."""
    channels: Tensor
    """int64 [G,r], best first: the channels that score tokens."""
    heads: Tensor
    """[G,g,m]: each head's score of every token, divided by the temperature."""
    tokens: Tensor
    """[G,m]: the scores summed over the group."""


def sparq_attention(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *,
    top_r: int, top_k: int, token_budget: int = 0, dense_until: int | None = None, reallocate: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step over a cache that already holds the current token; it reads that token and `top_k` others.

    query [B,H,D]; keys, values [B,G,C,D]; lengths [B]. Returns output [B,H,D] and selected int32 [B,G,k], ascending, -1
    where a row has fewer; rows of at most max(token_budget, dense_until) tokens read all of them. `reallocate` gives
    the attention that the scores leave to unread tokens to the mean of the row's values.
    """
    rows = check_cache(query, keys, values, lengths)
    checks.number("top_r", top_r, 1, query.shape[-1])
    checks.number("top_k", top_k, 1)
    width = max(top_k + 1, token_budget, dense_until or 0)
    selected = torch.full((*keys.shape[:2], width), -1, dtype=torch.int32, device=query.device)
    output = torch.empty_like(query)
    for b, m in enumerate(rows):
        if m <= width:
            output[b] = attend(query[b], keys[b, :, :m], values[b, :, :m])
            selected[b, :, :m] = torch.arange(m, device=query.device)
            continue
        scores = row_scores(query[b], keys[b, :, :m], top_r=top_r)
        ranked = scores.tokens.clone()
        ranked[:, m - 1] = torch.inf
        chosen = best_ascending(ranked, top_k + 1)
        output[b] = attend(query[b], gather_rows(keys[b], chosen), gather_rows(values[b], chosen))
        if reallocate:
            output[b] = _reallocated(output[b], scores.heads, chosen, values[b, :, :m])
        selected[b, :, : top_k + 1] = chosen
    return output, selected


def reallocated(
    attended: Tensor, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, selected: Tensor, channels: Tensor,
    *, dense_limit: int,
) -> Tensor:  # fmt: skip
    """Give the mean value the weight of unread tokens, where exact attention over `selected` is known already.

    attended, query [B,H,D]; keys, values [B,G,C,D]; lengths [B]; selected [B,G,k], -1 where a row has fewer; channels
    [B,G,r] score the tokens. Rows of at most `dense_limit` tokens read all of them, and stay as they are.
    """
    output = attended.clone()
    for b, m in enumerate(lengths.tolist()):
        if m > dense_limit:
            scores = row_scores(query[b], keys[b, :, :m], top_r=channels.shape[2], channels=channels[b])
            chosen = selected[b][:, (selected[b] >= 0).all(dim=0)].long()
            output[b] = _reallocated(attended[b], scores.heads, chosen, values[b, :, :m])
    return output


def row_scores(query: Tensor, keys: Tensor, *, top_r: int, channels: Tensor | None = None) -> SparqScores:
    """Score one row: query [H,D], keys [G,m,D].

    `channels` [G,r] replaces the choice of channels, to compare later steps with an executor that swapped tied ones."""
    kv_heads, length, size = keys.shape
    grouped = query.reshape(kv_heads, -1, size)
    importance = sum_in_order(grouped.abs(), 1)
    chosen = best(importance, top_r) if channels is None else channels.long()
    pick = chosen[:, None, :]
    q = grouped.gather(2, pick.expand(-1, grouped.shape[1], -1))
    products = q[:, :, None] * keys.gather(2, pick.expand(-1, length, -1))[:, None]
    heads = products.sum(dim=-1) / temperature(q, grouped)[..., None]
    return SparqScores(importance, chosen, heads, sum_in_order(heads, 1))


def channels_of(query: Tensor, kv_heads: int, top_r: int) -> Tensor:
    """Return the channels that score tokens for a query [B,H,D], where the group's |q| is largest: int64 [B,G,r]."""
    grouped = query.reshape(len(query), kv_heads, -1, query.shape[-1])
    return best(sum_in_order(grouped.abs(), 2), top_r)


def _reallocated(attended: Tensor, scores: Tensor, chosen: Tensor, values: Tensor) -> Tensor:
    """Give the mean value the unread share: attended [H,D], scores [G,g,m], chosen [G,k], values [G,m,D] -> [H,D]."""
    weights = torch.softmax(scores, dim=-1)
    read = weights.gather(2, chosen[:, None].expand(-1, weights.shape[1], -1)).sum(dim=-1).reshape(-1, 1)
    mean = values.mean(dim=1).repeat_interleave(scores.shape[1], dim=0)
    return read * attended + (1 - read) * mean
