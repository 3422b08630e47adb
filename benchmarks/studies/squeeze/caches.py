"""H2O's caches in a watched model, under several divisions at once, and caches of several kinds together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.studies.watched import Caches, Following, Seen, WatchedLayer
from kvc_trt.reference.methods.heavy_hitters import received_in_prompt, stay


class HeavyHitters:
    """Each KV head keeps the last tokens, and of the others those that received most attention, as `h2o` does.

    Half of a layer's budget, rounded up, is for the last tokens. A step attends to everything that is kept and to
    itself, and drops a token once the budget is exceeded.
    """

    def __init__(self, divisions: Sequence[Sequence[int]]) -> None:
        """Keep `divisions[cache][layer]` tokens."""
        self._divisions = divisions

    @property
    def count(self) -> int:
        """The number of divisions."""
        return len(self._divisions)

    def seen(self, layer: WatchedLayer, following: Following) -> Iterator[Seen]:
        """Yield the masks [H,M,n+M]."""
        groups, n, new = len(layer.keys), layer.keys.shape[1], following.new
        received, total = received_in_prompt(layer.query, layer.keys), n + new
        budgets = torch.tensor([one[layer.index] for one in self._divisions])
        recents = budgets - budgets // 2
        alive = torch.zeros(self.count, groups, total, dtype=torch.bool)
        for place, (budget, recent) in enumerate(zip(budgets.tolist(), recents.tolist(), strict=True)):
            alive[place].scatter_(1, stay(received, heavy=budget - recent, recent=recent), True)
        scores = torch.nn.functional.pad(received, (0, new)).repeat(self.count, 1, 1)
        logits, places, history = _logits(layer, following), torch.arange(total), []
        for step in range(new):
            at = n + step
            alive[..., at] = True
            history.append(alive.clone())
            attention = torch.softmax(logits[:, step].masked_fill(~alive[:, :, None], -torch.inf), dim=-1)
            scores += attention.sum(dim=2)
            contested = alive & (places <= at - recents[:, None])[:, None]
            worst = scores.masked_fill(~contested, torch.inf).argmin(dim=-1, keepdim=True)
            over = alive.sum(dim=-1, keepdim=True) > budgets[:, None, None]
            alive.scatter_(2, worst, alive.gather(2, worst) & ~over)
        heads = layer.query.shape[0] // groups
        for mask in torch.stack(history, dim=2):
            yield Seen(mask.repeat_interleave(heads, dim=0))


def _logits(layer: WatchedLayer, following: Following) -> Tensor:
    """Return every new token's logits, before any mask: [count,M,G,g,n+M]."""
    count, new, heads, size = following.query.shape
    groups, n = layer.keys.shape[:2]
    grouped = following.query.reshape(count, new, groups, heads // groups, size) / math.sqrt(size)
    old = torch.einsum("cmgqd,gnd->cmgqn", grouped, layer.keys)
    own = torch.einsum("cmgqd,ckgd->cmgqk", grouped, following.keys)
    future = torch.arange(new) > torch.arange(new)[:, None]
    assert old.shape[-1] == n
    return torch.cat([old, own.masked_fill(future[None, :, None, None], -torch.inf)], dim=-1)


class Together:
    """Caches of several kinds behind one prompt."""

    def __init__(self, *parts: Caches) -> None:
        self._parts = parts

    @property
    def count(self) -> int:
        """The number of caches of all kinds."""
        return sum(part.count for part in self._parts)

    def seen(self, layer: WatchedLayer, following: Following) -> Iterator[Seen]:
        """Yield the tokens that each cache sees, kind after kind."""
        first = 0
        for part in self._parts:
            own = slice(first, first + part.count)
            yield from part.seen(layer, Following(following.query[own], following.keys[own]))
            first += part.count
