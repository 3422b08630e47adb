"""Exact attention: of a prompt, and of one decode step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.softmax import PLAIN, Softmax


def attend(query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
    """Attend to all entries of one row: [H,D], [G,n,D], [G,n,D] -> [H,D]; zeros if n = 0."""
    if keys.shape[1] == 0:
        return torch.zeros_like(query)
    return (attention_weights(query, keys, softmax) @ values).reshape(query.shape)


def attention_weights(query: Tensor, keys: Tensor, softmax: Softmax = PLAIN) -> Tensor:
    """Return the attention probabilities of one row's heads: [H,D], [G,n,D] -> [G,g,n]; without sinks they sum to 1."""
    grouped = query.reshape(keys.shape[0], -1, query.shape[1])
    return softmax.probabilities(softmax.capped(grouped @ keys.transpose(1, 2) / math.sqrt(query.shape[1])))


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, softmax: Softmax = PLAIN
) -> Tensor:
    """Attention over the first `lengths[b]` slots of each row; the current token is already stored.

    query [B,H,D]; keys, values [B,G,C,D]; lengths [B]. Returns [B,H,D]. Raises ValueError for shapes that do not fit.
    """
    rows = check_cache(query, keys, values, lengths)
    return torch.stack([attend(query[b], keys[b, :, :m], values[b, :, :m], softmax) for b, m in enumerate(rows)])


def causal_attention(
    query: Tensor, keys: Tensor, values: Tensor, block: int = 256, *, window: int | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:  # fmt: skip
    """Exact attention of one row's last n tokens, each seeing itself and all before: [H,n,D], [G,T,D] -> [H,n,D].

    With a `window`, each sees that many tokens, including itself. In a prompt, T = n. Computed in blocks of queries, so
    that memory grows with T, not n T; the result does not depend on the block.
    """
    heads, n, size = query.shape
    checks.tensor("keys", keys, f"[G,T,D={size}] of {query.dtype}", None, None, size, dtype=query.dtype)
    checks.group_size(heads, keys.shape[0], "query", query.shape)
    before = keys.shape[1] - n
    if before < 0:
        raise ValueError(f"keys has {keys.shape[1]} entries; expected at least the {n} of query")
    grouped = query.reshape(keys.shape[0], -1, n, size)
    positions = torch.arange(keys.shape[1], device=query.device)
    output = torch.empty_like(grouped)
    for start in range(0, n, block):
        end = min(start + block, n)
        seen = before + end
        logits = grouped[:, :, start:end] @ keys[:, None, :seen].transpose(2, 3) / math.sqrt(size)
        logits = softmax.capped(logits)
        age = positions[before + start : seen, None] - positions[:seen]
        logits.masked_fill_((age < 0) if window is None else (age < 0) | (age >= window), -torch.inf)
        output[:, :, start:end] = softmax.probabilities(logits) @ values[:, None, :seen]
    return output.reshape(heads, n, size)


def check_cache(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> list[int]:
    """Raise ValueError unless query and cache fit together; return the row lengths."""
    checks.tensor("query", query, "[B,H,D]", None, None, None)
    batch, heads, size = query.shape
    cache = f"[B={batch},G,C,D={size}] of {query.dtype}"
    checks.tensor("keys", keys, cache, batch, None, None, size, dtype=query.dtype)
    checks.tensor("values", values, f"{list(keys.shape)} like keys", *keys.shape, dtype=query.dtype)
    checks.group_size(heads, keys.shape[1], "query", query.shape)
    return checks.lengths("lengths", lengths, batch, 0, keys.shape[2])
