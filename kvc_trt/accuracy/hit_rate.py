"""SnapKV's question to its own selection: does it hold what generated tokens attend to? (arXiv 2404.14469, Eq. 2-8)

Pure functions over one layer and the prefix that may be evicted: the prompt without the observation window. Beside the
hit rate stand the attention that the selection keeps, and how much of the exact top-k it contains: a hit rate counts
every token above a threshold alike.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

THRESHOLD = 0.05
"""Attention from which a prefix token counts as looked for (theta of the paper)."""


class HitRate(NamedTuple):
    """Over the heads of one query."""

    rate: float | None
    """Hits over looked-for tokens; None where no token is looked for: such queries are skipped and counted."""
    looked_for: int
    """Entries of the attention above the threshold."""
    hits: int


def select_prefix(window_attention: Tensor, kept: int) -> Tensor:
    """Eq. 2-3: the `kept` prefix tokens that the window attends to most, per head, ties to the lowest index.

    window_attention [H,W,P]: attention of each window row over the prefix. Returns a mask [H,P].
    """
    import torch

    if window_attention.ndim != 3:
        raise ValueError(f"window_attention has shape {list(window_attention.shape)}; expected [H,W,P]")
    votes = window_attention.sum(dim=1)
    prefix = votes.shape[1]
    if not 0 <= kept <= prefix:
        raise ValueError(f"kept is {kept}; expected 0 to {prefix} (the prefix)")
    order = torch.argsort(votes, dim=1, descending=True, stable=True)
    mask = torch.zeros_like(votes, dtype=torch.bool)
    return mask.scatter(1, order[:, :kept], torch.ones_like(order[:, :kept], dtype=torch.bool))


def kept_tokens(rate: float, prefix: int) -> int:
    """floor(rate * prefix): how many tokens a keep rate means."""
    if not 0 <= rate <= 1:
        raise ValueError(f"rate is {rate}; expected 0 to 1")
    return math.floor(rate * prefix + 1e-9)  # 0.29 of 100 is 29


def hit_rate(selected: Tensor, attention: Tensor, threshold: float = THRESHOLD) -> HitRate:
    """Eq. 4-8: of the prefix tokens that a generated query attends to above `threshold`, the share selected.

    selected [H,P] (bool), attention [H,P]: softmax of one generated query, prefix columns only.
    """
    _check(selected, attention)
    looked_for = attention > threshold
    count, hits = int(looked_for.sum()), int((looked_for & selected).sum())
    return HitRate(hits / count if count else None, count, hits)


def attention_kept(selected: Tensor, attention: Tensor) -> float:
    """Sum of the exact attention over selected tokens, as a share of all attention on the prefix; mean over heads."""
    import torch

    _check(selected, attention)
    whole = attention.sum(dim=1)
    kept = torch.where(selected, attention, torch.zeros_like(attention)).sum(dim=1)
    shares = torch.where(whole > 0, kept / whole.clamp(min=torch.finfo(attention.dtype).tiny), torch.ones_like(whole))
    return float(shares.mean())


def overlap_with_exact(selected: Tensor, attention: Tensor) -> float:
    """The share of selected tokens that the exact top-k of the same size holds too; mean over heads.

    Ties go to the lowest index; heads that select nothing count as 1.
    """
    import torch

    _check(selected, attention)
    shares = []
    for mine, weights in zip(selected, attention, strict=True):
        count = int(mine.sum())
        best = torch.argsort(weights, descending=True, stable=True)[:count]
        shares.append(float(mine[best].float().mean()) if count else 1.0)
    return sum(shares) / len(shares)


def mean_hit_rate(found: list[HitRate]) -> tuple[float | None, int]:
    """Mean over the queries that look for something, and how many were skipped."""
    rates = [one.rate for one in found if one.rate is not None]
    return (sum(rates) / len(rates) if rates else None), len(found) - len(rates)


def _check(selected: Tensor, attention: Tensor) -> None:
    if selected.ndim != 2 or selected.shape != attention.shape:
        raise ValueError(
            f"selected has shape {list(selected.shape)}, attention {list(attention.shape)}; expected [H,P] twice"
        )
