"""Stage 2 of RocketKV, hybrid attention: which cached tokens one decode step reads (arXiv 2502.14051, algorithm 2).

Pages are scored from their key bounds on the few channels where the query is largest; the best pages' tokens, top_k of
them, are attended exactly. A row that fits the token budget is attended densely (docs/policies/hybrid.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.dense import attend, check_cache
from kvc_trt.reference.selection import best, best_ascending, gather_rows, sum_in_order
from kvc_trt.reference.softmax import PLAIN, Softmax


class StepScores(NamedTuple):
    """The ranked values of stage 2 for one row, used to prove that a different choice was a near-tie."""

    channel_values: Tensor
    """[G,D]: A, |q| summed over the group."""
    channels: Tensor
    """int64 [G,r], best first: the channels that score pages."""
    tokens: Tensor
    """[G,m]: f, equal for all tokens of a page."""
    magnitude: Tensor
    """[G]: M = the largest sum_d |q_d bound_d| / T over the group's heads and the row's pages."""


def hybrid_attention(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, page_min: Tensor, page_max: Tensor, *,
    page_size: int, top_r: int, top_k: int, token_budget: int | None = None, dense_until: int | None = None,
    select: str = "tokens", force_recent: int = 0, softmax: Softmax = PLAIN,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step over a cache that already holds the current token.

    query [B,H,D]; keys, values [B,G,C,D]; lengths [B]; page_min, page_max [B,G,P,D]. Returns output [B,H,D] and
    selected int32 [B,G,k], ascending, -1 where a row has fewer. `token_budget` switches "dense when it fits" on: rows
    of at most max(token_budget, dense_until) tokens read all of them, and k is that number if it exceeds `top_k`.
    select="pages" takes whole pages, max(1, top_k div page_size) of them; `force_recent` takes the last tokens first.
    The layer's `softmax` holds for page scores too: a cap is monotone, so a capped bound is one of capped logits.
    """
    rows = check_cache(query, keys, values, lengths)
    _check(query, keys, page_min, page_max, page_size, top_r)
    checks.number("top_k", top_k, 1)
    checks.number("force_recent", force_recent, 0, top_k)
    if select not in ("tokens", "pages") or (select == "pages" and force_recent):
        given = f"select is {select!r} with force_recent={force_recent}"
        raise ValueError(f'{given}; expected "tokens", or "pages" without force_recent')
    if token_budget is None and dense_until is not None:
        raise ValueError(f"dense_until is {dense_until} without a token_budget; expected both or token_budget alone")
    dense_limit = max(token_budget or 0, dense_until or 0)
    in_pages = max(1, top_k // page_size) * page_size if select == "pages" else 0
    shape = (*keys.shape[:2], max(top_k, dense_limit, in_pages))
    selected = torch.full(shape, -1, dtype=torch.int32, device=query.device)
    output = torch.empty_like(query)
    for b, m in enumerate(rows):
        if m <= max(dense_limit, top_k):
            output[b] = attend(query[b], keys[b, :, :m], values[b, :, :m], softmax)
            selected[b, :, :m] = torch.arange(m, device=query.device)
            continue
        row = query[b], m, page_min[b], page_max[b]
        found = row_scores(*row, page_size=page_size, top_r=top_r, softmax=softmax).tokens
        found[:, m - force_recent :] = torch.inf
        chosen = _choose(found, top_k, page_size if select == "pages" else None)
        output[b] = _attend_chosen(query[b], keys[b], values[b], chosen, softmax)
        for kv, index in enumerate(chosen):
            selected[b, kv, : len(index)] = index
    return output, selected


def row_scores(
    query: Tensor, length: int, page_min: Tensor, page_max: Tensor, *, page_size: int, top_r: int,
    channels: Tensor | None = None, softmax: Softmax = PLAIN,
) -> StepScores:  # fmt: skip
    """Score one row: query [H,D], page_min, page_max [G,P,D] -> StepScores (steps 3 to 7 of the method).

    `channels` [G,r] replaces the choice of step 3, to compare later steps with an executor that swapped tied channels.
    """
    kv_heads, _, size = page_min.shape
    pages = -(-length // page_size)
    grouped = query.reshape(kv_heads, -1, size)
    importance = sum_in_order(grouped.abs(), 1)
    chosen = best(importance, top_r) if channels is None else channels.long()
    pick = chosen[:, None, :]
    q = grouped.gather(2, pick.expand(-1, grouped.shape[1], -1))
    low = page_min[:, :pages].gather(2, pick.expand(-1, pages, -1))
    high = page_max[:, :pages].gather(2, pick.expand(-1, pages, -1))
    rising = sum_in_order(grouped, 1).gather(1, chosen)[:, None] > 0  # a sum of exactly 0 takes the minimum
    products = q[:, :, None] * torch.where(rising, high, low)[:, None]
    tempered = temperature(q, grouped)[..., None]
    by_page = softmax.capped(products.sum(dim=-1) / tempered)
    by_token = by_page.repeat_interleave(page_size, dim=-1)[..., :length]
    attention = softmax.probabilities(by_token)
    magnitude = (products.abs().sum(dim=-1) / tempered).amax(dim=(1, 2))
    return StepScores(importance, chosen, sum_in_order(attention, 1) / attention.shape[1], magnitude)


def temperature(chosen: Tensor, every: Tensor) -> Tensor:
    """Return the divisor of scores on some channels, sqrt(D * their share of |q|): [...,r], [...,D] -> [...]."""
    part, whole = chosen.abs().sum(dim=-1), every.abs().sum(dim=-1)
    return (every.shape[-1] * torch.where(part == 0, 1.0, part / whole)).sqrt()


def _choose(found: Tensor, top_k: int, page_size: int | None) -> list[Tensor]:
    """Return ascending token indices per KV head; whole pages (the last may be partial) if page_size is given."""
    if page_size is None:
        return list(best_ascending(found, top_k))
    pages = best_ascending(found[:, ::page_size], max(1, top_k // page_size))
    tokens = (pages[..., None] * page_size + torch.arange(page_size, device=found.device)).flatten(1)
    return [row[row < found.shape[1]] for row in tokens]


def _attend_chosen(query: Tensor, keys: Tensor, values: Tensor, chosen: list[Tensor], softmax: Softmax) -> Tensor:
    if len({len(index) for index in chosen}) == 1:
        index = torch.stack(chosen)
        return attend(query, gather_rows(keys, index), gather_rows(values, index), softmax)
    grouped = query.reshape(len(chosen), -1, query.shape[-1])
    heads = torch.arange(len(query)).reshape(len(chosen), -1).tolist()
    per_head = [
        attend(grouped[kv], keys[kv, None, i], values[kv, None, i], softmax.of_heads(heads[kv]))
        for kv, i in enumerate(chosen)
    ]
    return torch.cat(per_head)


def _check(query: Tensor, keys: Tensor, page_min: Tensor, page_max: Tensor, page_size: int, top_r: int) -> None:
    checks.number("page_size", page_size, 1)
    checks.number("top_r", top_r, 1, query.shape[-1])
    shape = (*keys.shape[:2], -(-keys.shape[2] // page_size), keys.shape[3])
    for name, bounds in (("page_min", page_min), ("page_max", page_max)):
        checks.tensor(name, bounds, f"{list(shape)} of {query.dtype}", *shape, dtype=query.dtype)
