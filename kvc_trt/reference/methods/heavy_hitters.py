"""H2O: keep the tokens that have received the most attention, and the last ones (arXiv 2306.14048, section 4).

An entry's score is the sum of all attention probabilities it has received, over queries and over the query heads of
its group; it is not divided by the number of queries that could see it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.cache import Selection
from kvc_trt.reference.compaction import Compacted
from kvc_trt.reference.dense import attention_weights, check_cache
from kvc_trt.reference.kept import check_prompts, gather_kept
from kvc_trt.reference.selection import best_ascending, gather_rows, sum_in_order


def keep_heavy_hitters(
    queries: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, *, heavy: int, recent: int
) -> Compacted:
    """Keep `recent` last tokens and the `heavy` best of the others of every prompt longer than their sum.

    queries [B,H,W,D]: all queries after RoPE, the last in row W-1 (rows above a prompt's first are ignored); keys,
    values [B,G,S,D] after RoPE; prompt_lengths [B], each in 1..min(S,W). `scores` of the result are those kept.
    """
    checks.tensor("keys", keys, "[B,G,S,D]", None, None, None, None)
    batch, heads, length, size = keys.shape
    checks.tensor("values", values, f"{list(keys.shape)} like keys", *keys.shape, dtype=keys.dtype)
    expected = f"[B={batch},H,W,D={size}] of {keys.dtype}"
    checks.tensor("queries", queries, expected, batch, None, None, size, dtype=keys.dtype)
    checks.group_size(queries.shape[1], heads, "queries", queries.shape)
    rows = checks.lengths("prompt_lengths", prompt_lengths, batch, 1, min(length, queries.shape[2]))
    width = min(heavy + recent, length)
    kept = keys.new_zeros(batch, heads, width, size), keys.new_zeros(batch, heads, width, size)
    indices = torch.full((batch, heads, width), -1, dtype=torch.int32, device=keys.device)
    scores = keys.new_zeros(batch, heads, width)
    for b, n in enumerate(rows):
        received = received_in_prompt(queries[b, :, queries.shape[2] - n :], keys[b, :, :n])
        index = stay(received, heavy=heavy, recent=recent)
        count = index.shape[1]
        indices[b, :, :count], scores[b, :, :count] = index, received.gather(1, index)
        for target, source in zip(kept, (keys, values), strict=True):
            target[b, :, :count] = gather_rows(source[b], index)
    return Compacted(*kept, indices, prompt_lengths.clamp(max=heavy + recent), scores)


def received_in_prompt(queries: Tensor, keys: Tensor, block: int = 256) -> Tensor:
    """Sum the attention that each of one row's T tokens receives from its last n queries: [H,n,D], [G,T,D] -> [G,T].

    In a prompt, n = T. A second pass in blocks of queries: memory grows with T, not n T, and the block changes only
    rounding.
    """
    _, n, size = queries.shape
    grouped, before = queries.reshape(keys.shape[0], -1, n, size), keys.shape[1] - n
    positions = torch.arange(keys.shape[1], device=keys.device)
    received = keys.new_zeros(keys.shape[0], keys.shape[1])
    for start in range(0, n, block):
        end = min(start + block, n)
        seen = before + end
        logits = grouped[:, :, start:end] @ keys[:, None, :seen].transpose(2, 3) / math.sqrt(size)
        logits.masked_fill_(positions[:seen] > positions[before + start : seen, None], -torch.inf)
        received[:, :seen] += torch.softmax(logits, dim=-1).sum(dim=(1, 2))
    return received


def keep_heavy_hitters_of_turn(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, new_lengths: Tensor, scores: Tensor,
    *, heavy: int, recent: int,
) -> Compacted:  # fmt: skip
    """Keep `recent` last tokens and the `heavy` best others of stored and new tokens, as after a prompt.

    queries [B,H,M,D]: those of the new tokens after RoPE, the last in row M-1; keys, values [B,G,T,D]: stored tokens in
    text order, then the new ones; lengths [B]: stored and new; new_lengths [B], each in 1..M; scores [B,G,T]: the
    attention that each has received before, 0 for new ones. `scores` of the result are those of the kept tokens, with
    the attention of these queries added.
    """
    rows = check_prompts(keys, values, lengths)
    checks.tensor("scores", scores, f"{list(keys.shape[:3])}", *keys.shape[:3], dtype=keys.dtype)
    new = checks.lengths("new_lengths", new_lengths, len(rows), 1, queries.shape[2])
    after, chosen = scores.clone(), []
    for b, (n, added) in enumerate(zip(rows, new, strict=True)):
        after[b, :, :n] += received_in_prompt(queries[b, :, queries.shape[2] - added :], keys[b, :, :n])
        chosen.append(stay(after[b, :, :n], heavy=heavy, recent=recent))
    kept = gather_kept(keys, values, chosen, min(heavy + recent, keys.shape[2]))
    paid = torch.zeros(kept.indices.shape, dtype=keys.dtype, device=keys.device)
    for b, index in enumerate(chosen):
        paid[b, :, : index.shape[1]] = after[b].gather(1, index)
    return kept._replace(scores=paid)


def heavy_hitter_attention(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scores: Tensor, *, heavy: int, recent: int
) -> Selection:
    """One step over a cache that already holds the current token, whose score is still 0.

    query [B,H,D]; keys, values [B,G,C,D]; lengths [B]; scores [B,G,C]. All entries are attended; `kept` are the at most
    heavy + recent slots that stay, and `scores` is the attention that each entry has received so far.
    """
    rows = check_cache(query, keys, values, lengths)
    checks.tensor("scores", scores, f"{list(keys.shape[:3])}", *keys.shape[:3], dtype=keys.dtype)
    output, after, kept = torch.empty_like(query), scores.clone(), []
    for b, m in enumerate(rows):
        weights = attention_weights(query[b], keys[b, :, :m])
        output[b] = (weights @ values[b, :, :m]).reshape(query.shape[1:])
        after[b, :, :m] += sum_in_order(weights, 1)
        kept.append(stay(after[b, :, :m], heavy=heavy, recent=recent))
    return Selection(output, kept=kept, scores=after)


def stay(scores: Tensor, *, heavy: int, recent: int) -> Tensor:
    """Choose the slots to keep of entries in text order: scores [G,m] -> int64 [G,min(m,heavy+recent)], ascending."""
    heads, m = scores.shape
    index = torch.arange(m, device=scores.device).expand(heads, m)
    if m <= heavy + recent:
        return index
    return torch.cat([best_ascending(scores[:, : m - recent], heavy), index[:, m - recent :]], dim=-1)
