"""A turn of a conversation: many new tokens of a row at once, onto a cache that holds earlier ones.

The new tokens attend exactly to everything stored and causally to each other. Then they are appended, or stored and new
tokens compete for the slots under the method's own rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvc_trt.reference import checks
from kvc_trt.reference.bounds import append_in_place
from kvc_trt.reference.compaction import Compacted, PoolKind, compact
from kvc_trt.reference.dense import causal_attention
from kvc_trt.reference.softmax import PLAIN, Softmax


class Turn(NamedTuple):
    """The tokens that compete for a cache's slots after a turn, and the queries of the turn."""

    keys: Tensor
    """[B,G,T,D]: the stored tokens in text order, then the new ones; zeros past a row's end."""
    values: Tensor
    lengths: Tensor
    """int64 [B]: stored and new tokens."""
    new_lengths: Tensor
    """int64 [B]: new tokens."""
    positions: Tensor
    """int64 [B]: logical position of the token after the turn."""
    queries: Tensor
    """[B,H,M,D]: the turn's queries after RoPE, right-aligned; zeros before a row's first."""
    plain_queries: Callable[[], Tensor]
    """Returns [B,H,M,D]: the turn's queries before RoPE, the first in row 0; zeros past a row's end."""
    rotary_tables: tuple[Tensor, Tensor]
    """Cosine and sine of every position, [L,D/2]."""
    places: Tensor
    """int64 [B,G,T]: the logical position of each token."""
    scores: Tensor | None = None
    """[B,G,T]: attention that each token has received before the turn, if the policy evicts by it."""
    softmax: Softmax = PLAIN
    """The softmax that the layer's attention applies to its logits."""

    def row(self, b: int) -> Turn:
        """Return one row of the batch."""
        one, plain = slice(b, b + 1), self.plain_queries
        return Turn(
            self.keys[one], self.values[one], self.lengths[one], self.new_lengths[one], self.positions[one],
            self.queries[one], lambda: plain()[one], self.rotary_tables, self.places[one],
            None if self.scores is None else self.scores[one], self.softmax,
        )  # fmt: skip


def join(
    keys: Tensor, values: Tensor, lengths: Tensor, k_new: Tensor, v_new: Tensor, new_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a block of new tokens behind those stored: -> keys, values [B,G,C+M,D], zeros past a row's end; lengths [B].

    keys, values [B,G,C,D], lengths [B] in 0..C; k_new, v_new [B,G,M,D] padded on the right, new_lengths [B] in 1..M.
    """
    stored, new = check_block(keys, values, lengths, k_new, v_new, new_lengths)
    batch, heads, slots, size = keys.shape
    joined = tuple(keys.new_zeros(batch, heads, slots + k_new.shape[2], size) for _ in range(2))
    for target, old, added in zip(joined, (keys, values), (k_new, v_new), strict=True):
        for b, (m, n) in enumerate(zip(stored, new, strict=True)):
            target[b, :, :m], target[b, :, m : m + n] = old[b, :, :m], added[b, :, :n]
    return joined[0], joined[1], lengths + new_lengths


def extend_attention(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, new_lengths: Tensor, *, window: int | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:  # fmt: skip
    """Attend from new tokens to everything stored and causally to each other; -> [B,H,M,D], zeros for padding.

    queries [B,H,M,D], padded on the right; keys, values [B,G,T,D]: `lengths` [B] stored entries, then `new_lengths`
    [B] new ones. Query i of row b sees the first lengths[b] + i + 1 entries, or the last `window` of these.
    """
    checks.tensor("queries", queries, "[B,H,M,D]", None, None, None, None)
    batch, heads, block, size = queries.shape
    cache = f"[B={batch},G,T,D={size}] of {queries.dtype}"
    checks.tensor("keys", keys, cache, batch, None, None, size, dtype=queries.dtype)
    checks.tensor("values", values, f"{list(keys.shape)} like keys", *keys.shape, dtype=keys.dtype)
    checks.group_size(heads, keys.shape[1], "queries", queries.shape)
    new = checks.lengths("new_lengths", new_lengths, batch, 1, block)
    stored = checks.lengths("lengths", lengths, batch, 0, keys.shape[2])
    for b, (m, n) in enumerate(zip(stored, new, strict=True)):
        if m + n > keys.shape[2]:
            raise ValueError(f"row {b} has {m} stored and {n} new entries; expected at most {keys.shape[2]} in all")
    output = torch.zeros_like(queries)
    for b, (m, n) in enumerate(zip(stored, new, strict=True)):
        row = queries[b, :, :n], keys[b, :, : m + n], values[b, :, : m + n]
        output[b, :, :n] = causal_attention(*row, window=window, softmax=softmax)
    return output


def append_block(
    keys: Tensor, values: Tensor, page_min: Tensor | None, page_max: Tensor | None, lengths: Tensor, k_new: Tensor,
    v_new: Tensor, new_lengths: Tensor, *, page_size: int, fp8: bool = False,
) -> None:  # fmt: skip
    """Store a block of new tokens at slots lengths[b] and after, in place, and widen the bounds of their pages.

    As many single appends: keys, values [B,G,C,D]; page_min, page_max [B,G,P,D] or None; lengths, new_lengths [B], each
    sum at most C; k_new, v_new [B,G,M,D], padded on the right.
    """
    stored, new = check_block(keys, values, lengths, k_new, v_new, new_lengths)
    for b, (m, n) in enumerate(zip(stored, new, strict=True)):
        if m + n > keys.shape[2]:
            raise ValueError(f"row {b} stores {m} tokens and gets {n}; expected at most {keys.shape[2]} in all")
        low, high = (None if table is None else table[b : b + 1] for table in (page_min, page_max))
        tables = keys[b : b + 1], values[b : b + 1], low, high
        for i in range(n):
            slot, entry = lengths[b : b + 1] + i, (k_new[b : b + 1, :, i], v_new[b : b + 1, :, i])
            append_in_place(tables, slot, *entry, page_size=page_size, fp8=fp8)


def compact_turn(
    q_window: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, new_lengths: Tensor,
    *, prompt_budget: int | Tensor, pool_kernel: int | Tensor, pool_kind: PoolKind = "max", softmax: Softmax = PLAIN,
) -> Compacted:  # fmt: skip
    """Keep `prompt_budget` of the stored and new tokens of every row that has more: `compact` over both, row by row.

    q_window [B,H,W,D]: the last W queries of the turn after RoPE, right-aligned; keys, values [B,G,T,D]: stored tokens,
    then new ones; lengths [B]: stored and new; new_lengths [B]. The last min(W, new_lengths[b]) queries of a row vote
    and their tokens are always kept; pooling runs over slots. Indices count slots of `keys`.
    `prompt_budget` and `pool_kernel` may be integers [B], one per row, and `pool_kind` is one for all, as in `compact`.
    Votes are probabilities of the layer's `softmax`.
    """
    window, batch = q_window.shape[2], len(keys)
    new = checks.lengths("new_lengths", new_lengths, batch, 1, keys.shape[2])
    budgets, kernels = (checks.per_row(name, value, batch) for name, value in (
        ("prompt_budget", prompt_budget), ("pool_kernel", pool_kernel)
    ))  # fmt: skip
    slots, rows = min(max(budgets), keys.shape[2]), []
    for b, n in enumerate(new):
        one, voting = slice(b, b + 1), q_window[b : b + 1, :, window - min(window, n) :]
        numbers = {"prompt_budget": budgets[b], "pool_kernel": kernels[b]}
        row = compact(voting, keys[one], values[one], lengths[one], **numbers, pool_kind=pool_kind, softmax=softmax)
        missing = slots - row.indices.shape[2]
        rows.append((
            pad(row.keys, (0, 0, 0, missing)), pad(row.values, (0, 0, 0, missing)),
            pad(row.indices, (0, missing), value=-1), row.lengths,
        ))  # fmt: skip
    return Compacted(*(torch.cat(tables) for tables in zip(*rows, strict=True)))


def check_block(
    keys: Tensor, values: Tensor, lengths: Tensor, k_new: Tensor, v_new: Tensor, new_lengths: Tensor
) -> tuple[list[int], list[int]]:
    """Raise ValueError unless a cache and a block of new tokens fit together; return stored and new lengths."""
    checks.tensor("keys", keys, "[B,G,C,D]", None, None, None, None)
    batch, heads, slots, size = keys.shape
    checks.tensor("values", values, f"{list(keys.shape)} like keys", *keys.shape, dtype=keys.dtype)
    expected = f"[B={batch},G={heads},M,D={size}] of {keys.dtype}"
    checks.tensor("k_new", k_new, expected, batch, heads, None, size, dtype=keys.dtype)
    checks.tensor("v_new", v_new, f"{list(k_new.shape)} like k_new", *k_new.shape, dtype=keys.dtype)
    stored = checks.lengths("lengths", lengths, batch, 0, slots)
    return stored, checks.lengths("new_lengths", new_lengths, batch, 1, k_new.shape[2])
