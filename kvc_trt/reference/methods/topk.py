"""Exact top-k attention: the oracle that other selections are measured against (RocketKV, arXiv 2502.14051, A.3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.cache import Selection
from kvc_trt.reference.dense import attend, check_cache
from kvc_trt.reference.selection import best_ascending, dot_products, gather_rows, sum_in_order


def exact_topk(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, top_k: int, dense_until: int = 0,
    per_query_head: bool = True,
) -> Selection:  # fmt: skip
    """One step over a cache that already holds the current token.

    query [B,H,D]; keys, values [B,G,C,D]; lengths [B]. Rows of at most `dense_until` tokens read all of them. Each
    query head takes the `top_k` tokens of its largest logits, or the heads of a group together those of the largest
    sum of probabilities. `selected` is int32 [B,H,k] or [B,G,k], k = max(top_k, dense_until).
    """
    rows = check_cache(query, keys, values, lengths)
    checks.number("top_k", top_k, 1)
    output, lists = torch.empty_like(query), query.shape[1] if per_query_head else keys.shape[1]
    selected = torch.full((len(rows), lists, max(top_k, dense_until)), -1, dtype=torch.int32, device=query.device)
    shared = lists // keys.shape[1]
    for b, m in enumerate(rows):
        row_keys, row_values = keys[b, :, :m], values[b, :, :m]
        if m <= max(top_k, dense_until):
            output[b] = attend(query[b], row_keys, row_values)
            selected[b, :, :m] = torch.arange(m, device=query.device)
            continue
        row_keys, row_values = (table.repeat_interleave(shared, dim=0) for table in (row_keys, row_values))
        grouped = query[b].reshape(lists, -1, query.shape[2])
        products = [dot_products(heads, of_list) for heads, of_list in zip(grouped, row_keys, strict=True)]
        logits = torch.stack(products) / math.sqrt(query.shape[2])
        # A single head ranks logits: many probabilities are 0 in float32 and would be tied.
        scores = logits[:, 0] if per_query_head else sum_in_order(torch.softmax(logits, dim=-1), 1)
        index = best_ascending(scores, top_k)
        output[b] = attend(query[b], gather_rows(row_keys, index), gather_rows(row_values, index))
        selected[b, :, :top_k] = index
    return Selection(output, selected)
