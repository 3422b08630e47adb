"""Expected Attention: estimate the attention of future queries from the prompt's queries (arXiv 2510.00636).

A head's queries before the rotary embedding are modelled as draws from a normal distribution, whose mean and covariance
are those of the prompt's queries. Rotated by the mean rotation of the next positions, it gives the attention that each
key can expect. The question that will be asked is not used.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvc_trt.reference import checks
from kvc_trt.reference.compaction import Compacted
from kvc_trt.reference.kept import check_prompts, everything, gather_kept
from kvc_trt.reference.layers import rotated
from kvc_trt.reference.selection import best_ascending, dot_products, sum_in_order


class ExpectedQueries(NamedTuple):
    """The expected distribution of the queries after a prompt, rotated."""

    mean: Tensor
    """[B,H,D]"""
    covariance: Tensor
    """[B,H,D,D]"""


def future_rotation(
    cosine: Tensor, sine: Tensor, prompt_lengths: Tensor, *, future_positions: int
) -> tuple[Tensor, Tensor]:
    """The mean rotation of the positions n .. n + future_positions - 1 that follow each prompt, as cosine and sine.

    cosine, sine [L,D/2]: of every position below L; prompt_lengths [B], each below L. Returns two tensors [B,D/2]. The
    mean over these positions is the mean over the first ones turned by n, so L need not reach past the prompts.
    """
    checks.tensor("cosine", cosine, "[L,D/2]", None, None)
    checks.tensor("sine", sine, f"{list(cosine.shape)} like cosine", *cosine.shape, dtype=cosine.dtype)
    checks.number("future_positions", future_positions, 1, len(cosine))
    rows = checks.lengths("prompt_lengths", prompt_lengths, len(prompt_lengths), 0, len(cosine) - 1)
    mean_cosine, mean_sine = (table[:future_positions].mean(dim=0) for table in (cosine, sine))
    cosine, sine = cosine[rows], sine[rows]
    return cosine * mean_cosine - sine * mean_sine, sine * mean_cosine + cosine * mean_sine


def expected_queries(
    queries: Tensor, rotation: tuple[Tensor, Tensor], prompt_lengths: Tensor, *, sinks: int
) -> ExpectedQueries:
    """Return rotated mean and covariance of each head's queries after the first `sinks` tokens, or zeros if none.

    queries [B,H,S,D] before RoPE, position i in row i; rotation [B,D/2] twice, as `future_rotation` gives it;
    prompt_lengths [B], each in 1..S. The covariance is divided by the number of queries.
    """
    checks.tensor("queries", queries, "[B,H,S,D]", None, None, None, None)
    checks.number("sinks", sinks, 0)
    batch, heads, length, size = queries.shape
    for name, table in zip(("cosine", "sine"), rotation, strict=True):
        checks.tensor(f"rotation ({name})", table, f"[{batch},{size // 2}]", batch, size // 2, dtype=queries.dtype)
    mean, covariance = queries.new_zeros(batch, heads, size), queries.new_zeros(batch, heads, size, size)
    for b, n in enumerate(checks.lengths("prompt_lengths", prompt_lengths, batch, 1, length)):
        if n > sinks:
            seen = queries[b, :, sinks:n]
            mean[b] = seen.mean(dim=1)
            centred = seen - mean[b, :, None]
            covariance[b] = centred.transpose(1, 2) @ centred / (n - sinks)
    # R Sigma R^T: the rotation of every row of (R Sigma), which is that of every column of Sigma.
    turned = _rotated(covariance.transpose(2, 3), rotation).transpose(2, 3)
    return ExpectedQueries(_rotated(mean, rotation), _rotated(turned, rotation))


def keep_expected(
    queries: ExpectedQueries, keys: Tensor, values: Tensor, prompt_lengths: Tensor, *, prompt_budget: int, sinks: int,
    use_covariance: bool = True, use_value_norm: bool = True, epsilon: float = 0.0,
) -> Compacted:  # fmt: skip
    """Keep the first `sinks` tokens and the best others, `prompt_budget` in all, of every prompt longer than that.

    queries as `expected_queries` gives them; keys, values [B,G,S,D], keys after RoPE; prompt_lengths [B], each in 1..S.
    """
    rows = check_prompts(keys, values, prompt_lengths)
    batch, heads, length, size = keys.shape
    mean, covariance = queries
    expected = f"[B={batch},H,D={size}] of {keys.dtype}"
    checks.tensor("queries.mean", mean, expected, batch, None, size, dtype=keys.dtype)
    shape = [batch, mean.shape[1], size, size]
    checks.tensor("queries.covariance", covariance, str(shape), *shape, dtype=keys.dtype)
    checks.group_size(mean.shape[1], heads, "queries.mean", mean.shape)
    checks.number("sinks", sinks, 0)
    checks.number("prompt_budget", prompt_budget, sinks + 1)
    chosen = []
    for b, n in enumerate(rows):
        index = everything(keys, n)
        if n > prompt_budget:
            score = expected_attention(
                mean[b], covariance[b] if use_covariance else None, keys[b, :, sinks:n], values[b, :, sinks:n],
                use_value_norm=use_value_norm, epsilon=epsilon,
            )  # fmt: skip
            best = sinks + best_ascending(score, prompt_budget - sinks)
            index = torch.cat([index[:, :sinks], best], dim=1)
        chosen.append(index)
    return gather_kept(keys, values, chosen, min(prompt_budget, length))


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """`x` [B,...,D], each row under its own rotation."""
    cosine, sine = (table.reshape(len(x), *[1] * (x.ndim - 2), -1) for table in rotation)
    return rotated(x, cosine, sine)


def expected_attention(
    mean: Tensor, covariance: Tensor | None, keys: Tensor, values: Tensor, *, use_value_norm: bool, epsilon: float
) -> Tensor:
    """Score each key of one row: mean [H,D], covariance [H,D,D], both rotated, keys, values [G,n,D] -> [G,n].

    exp(mu.k / sqrt(D) + k.Sigma.k / 2D) normalised over the keys, mean over the group, times the value's length.
    """
    heads, _, size = keys.shape
    group = len(mean) // heads
    logits = torch.cat([dot_products(mean[h, None], keys[h // group]) for h in range(len(mean))]) / math.sqrt(size)
    if covariance is not None:
        for h, of_head in enumerate(covariance):
            spread = dot_products(of_head, keys[h // group]).T.contiguous()  # Sigma k of every key, [n,D]
            logits[h] += (spread * keys[h // group]).sum(dim=-1) / (2 * size)
    attention = torch.softmax(logits, dim=-1).reshape(heads, group, -1)
    score = sum_in_order(attention, 1) / group
    if use_value_norm:
        score = (score + epsilon) * torch.linalg.vector_norm(values, dim=-1)
    return score
