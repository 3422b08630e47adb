"""The softmax of attention: capped logits (Gemma 2, arXiv 2408.00118), and sinks in its denominator (gpt-oss)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Softmax(NamedTuple):
    """The softmax of a layer's attention, with its caps and sinks; the default is the plain softmax."""

    cap: float | None = None
    """A logit l becomes cap tanh(l / cap), before anything is masked."""
    sinks: Tensor | None = None
    """[H]: a learned logit of each query head, whose exponential is part of the denominator and of nothing else."""

    @property
    def plain(self) -> bool:
        """True for the softmax without cap and sinks."""
        return self.cap is None and self.sinks is None

    def capped(self, logits: Tensor) -> Tensor:
        """Return logits of any shape under the cap, rounded once.

        In float32, tanh may differ in the last bit between whole vectors and the remainder of a row, and ties would be
        lost.
        """
        import torch

        return logits if self.cap is None else (torch.tanh(logits.double() / self.cap) * self.cap).to(logits.dtype)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Normalise capped and masked logits [G,g,...,n] over their last axis; with sinks they sum to less than 1."""
        import torch

        if self.sinks is None:
            return torch.softmax(logits, dim=-1)
        own = self.sinks.to(logits.dtype).reshape(*logits.shape[:2], *[1] * (logits.ndim - 2))
        every = torch.cat([logits, own.expand(*logits.shape[:-1], 1)], dim=-1)
        return torch.softmax(every, dim=-1)[..., :-1]

    def of_heads(self, heads: Sequence[int]) -> Softmax:
        """Return the softmax of some query heads."""
        return self if self.sinks is None else self._replace(sinks=self.sinks[list(heads)])


PLAIN = Softmax()


class Observed(NamedTuple):
    """The last queries and the softmax of a layer, which compaction observes where that softmax is not plain."""

    queries: Tensor
    """[B,H,W,D]"""
    softmax: Softmax
