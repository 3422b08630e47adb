"""Stage 1 of RocketKV, "SnapKV++": which prompt tokens stay (arXiv 2502.14051, algorithm 1; docs/policies/snapkv++.md).

The last W prompt queries vote for every earlier token with their softmax probability; votes are summed over the window,
then over the query heads that share a KV head, and only then spread to neighbours by pooling. Summing after pooling
keeps other tokens.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.selection import best_ascending, dot_products, gather_rows, sum_in_order
from kvc_trt.reference.softmax import PLAIN, Softmax

PoolKind = Literal["max", "avg"]
"""The pooling of votes over neighbours: their maximum or their average."""


class Compacted(NamedTuple):
    """The compacted cache of prompts: C = min(prompt_budget, S) slots, zeros past a row's length."""

    keys: Tensor
    """[B,G,C,D]"""
    values: Tensor
    """[B,G,C,D]"""
    indices: Tensor
    """int32 [B,G,C]: the prompt position in each slot, ascending; -1 past the row's length."""
    lengths: Tensor
    """[B]: slots in use."""
    scores: Tensor | None = None
    """[B,G,C]: attention received by each entry, if the policy evicts by it while decoding."""


class PromptScores(NamedTuple):
    """The ranked values of stage 1, used to prove that a different choice was a near-tie."""

    values: Tensor
    """[B,G,S]: the pooled score v, for averages the sum; -inf for the window and padding, which are not ranked."""
    magnitude: Tensor
    """[B,G]: M = the largest sum_d |q_d k_d| / sqrt(D) over the group's queries: rounding scales with it."""


def compact(
    q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor,
    *, prompt_budget: int | Tensor, pool_kernel: int | Tensor, pool_kind: PoolKind = "max", softmax: Softmax = PLAIN,
) -> Compacted:  # fmt: skip
    """Keep `prompt_budget` tokens per KV head of every prompt longer than that, all tokens of the others.

    q_window [B,H,W,D]: the last W queries after RoPE, row i at position n-W+i (rows below 0 are ignored);
    keys, values [B,G,S,D] after RoPE; prompt_lengths [B], each in 1..S. The window itself is always kept.
    `prompt_budget` and `pool_kernel` may be integers [B], one per prompt; then C = min(the largest budget, S).
    `pool_kind` is "max", or "avg" for SnapKV's average-pooling (arXiv 2404.14469, section 5.2): `_sum_pool`. Votes are
    probabilities of the layer's `softmax`.
    """
    batch, heads, size, rows = _check(q_window, keys, values, prompt_lengths)
    budgets, kernels = (checks.per_row(name, value, batch) for name, value in (
        ("prompt_budget", prompt_budget), ("pool_kernel", pool_kernel)
    ))  # fmt: skip
    window, slots = q_window.shape[2], min(max(budgets), keys.shape[2])
    _check_kind(pool_kind)
    for n, budget, kernel in zip(rows, budgets, kernels, strict=True):
        checks.number("prompt_budget", budget, 1 if n <= budget else window)
        checks.number("pool_kernel", kernel, 1, odd=True)
    kept = keys.new_zeros(batch, heads, slots, size), keys.new_zeros(batch, heads, slots, size)
    indices = torch.full((batch, heads, slots), -1, dtype=torch.int32, device=keys.device)
    for b, n in enumerate(rows):
        index = torch.arange(n, device=keys.device).expand(heads, n)
        if n > budgets[b]:
            votes, _ = _row_scores(q_window[b], keys[b, :, :n], kernels[b], pool_kind, softmax)
            winners = best_ascending(votes, budgets[b] - window)
            index = torch.cat([winners, index[:, n - window :]], dim=-1)
        length = index.shape[1]
        indices[b, :, :length] = index
        for target, source in zip(kept, (keys, values), strict=True):
            target[b, :, :length] = gather_rows(source[b], index)
    return Compacted(*kept, indices, prompt_lengths.minimum(prompt_lengths.new_tensor(budgets)))


def scores(
    q_window: Tensor, keys: Tensor, prompt_lengths: Tensor, *, pool_kernel: int, pool_kind: PoolKind = "max",
    softmax: Softmax = PLAIN,
) -> PromptScores:  # fmt: skip
    """Return the values that `compact` ranks, also for rows that fit and need no ranking."""
    batch, heads, _, rows = _check(q_window, keys, keys, prompt_lengths)
    checks.number("pool_kernel", pool_kernel, 1, odd=True)
    _check_kind(pool_kind)
    ranked = keys.new_full((batch, heads, keys.shape[2]), -torch.inf)
    magnitude = keys.new_zeros(batch, heads)
    for b, n in enumerate(rows):
        window = min(q_window.shape[2], n)
        found = _row_scores(q_window[b, :, -window:], keys[b, :, :n], pool_kernel, pool_kind, softmax)
        ranked[b, :, : n - window], magnitude[b] = found
    return PromptScores(ranked, magnitude)


def _row_scores(
    q_window: Tensor, keys: Tensor, pool_kernel: int, pool_kind: PoolKind, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Score one prompt, one KV head at a time: q_window [H,W,D], keys [G,n,D] -> pooled votes [G,n-W] and M [G]."""
    heads, (_, window, size), n = keys.shape[0], q_window.shape, keys.shape[1]
    positions = torch.arange(n, device=keys.device)
    hidden = positions > positions[n - window :, None]
    votes, magnitude = keys.new_empty(heads, n - window), keys.new_empty(heads)
    group = len(q_window) // heads
    for kv, queries in enumerate(q_window.reshape(heads, -1, window, size)):
        logits = dot_products(queries.flatten(0, 1), keys[kv]).reshape(*queries.shape[:2], n) / math.sqrt(size)
        masked = softmax.capped(logits).masked_fill(hidden, -torch.inf)
        own = softmax.of_heads(list(range(kv * group, (kv + 1) * group)))
        attention = own.probabilities(masked[None])[0]
        per_head = sum_in_order(attention[..., : n - window], 1)
        votes[kv] = sum_in_order(per_head, 0)
        magnitude[kv] = (queries.abs() @ keys[kv].abs().T).max() / math.sqrt(size)
    return (_sum_pool if pool_kind == "avg" else _max_pool)(votes, pool_kernel), magnitude


def _max_pool(votes: Tensor, kernel: int) -> Tensor:
    """Give each position the best vote within (kernel-1)/2 positions, clipped to the range: [G,n] -> [G,n]."""
    if votes.shape[1] == 0:
        return votes
    return torch.nn.functional.max_pool1d(votes[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]


def _sum_pool(votes: Tensor, kernel: int) -> Tensor:
    """Give each position the sum of the `kernel` votes around it, the lowest position first: [G,n] -> [G,n].

    Before the prompt and from the window on lie zeros, which count. So the sum is `kernel` times the average of the
    released code (torch's avg_pool1d, count_include_pad), and ranks positions as the average does.
    """
    if votes.shape[1] == 0:
        return votes
    return sum_in_order(torch.nn.functional.pad(votes, (kernel // 2, kernel // 2)).unfold(1, kernel, 1), 2)


def _check_kind(pool_kind: str) -> None:
    if pool_kind not in get_args(PoolKind):
        raise ValueError(f"pool_kind is {pool_kind!r}; expected {' or '.join(map(repr, get_args(PoolKind)))}")


def _check(q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor) -> tuple[int, int, int, list[int]]:
    checks.tensor("keys", keys, "[B,G,S,D]", None, None, None, None)
    batch, heads, length, size = keys.shape
    checks.tensor("values", values, f"{list(keys.shape)} like keys", *keys.shape, dtype=keys.dtype)
    expected = f"[B={batch},H,W,D={size}] of {keys.dtype}"
    checks.tensor("q_window", q_window, expected, batch, None, None, size, dtype=keys.dtype)
    checks.group_size(q_window.shape[1], heads, "q_window", q_window.shape)
    checks.number("the window (q_window.shape[2])", q_window.shape[2], 1)
    return batch, heads, size, checks.lengths("prompt_lengths", prompt_lengths, batch, 1, length)
