"""The tokens that cells keep and read, for all steps of an answer at once.

`tests/benchmarks/studies/test_two_stages.py` compares logits under these choices with those of the policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.studies.pooling.measure import pooled
from benchmarks.studies.two_stages.cells import First, Second
from benchmarks.studies.watched import WatchedLayer
from kvc_trt.reference.methods.hybrid import temperature


@dataclass
class Prompt:
    """A layer's prompt; values that several cells share are computed once."""

    layer: WatchedLayer
    _orders: dict[First, Tensor] = field(default_factory=dict)

    def kept(self, first: First, count: int) -> Tensor:
        """Choose `count` tokens of the prompt's n, all if it has no more: positions, ascending, [G,B]."""
        lists, n, _ = self.layer.keys.shape
        if first.rule == "all" or count >= n:
            return torch.arange(n).expand(lists, n)
        if first not in self._orders:
            self._orders[first] = self._order(first).expand(lists, -1)
        window = self._always(first)
        recent = torch.arange(n - window, n).expand(lists, window)
        return torch.cat([self._orders[first][:, : count - window], recent], dim=-1).sort(dim=-1).values

    @staticmethod
    def _always(first: First) -> int:
        """Return how many last tokens stay in any case."""
        return 1 if first.rule == "tova" else first.window

    def _order(self, first: First) -> Tensor:
        """Return the positions in front of those that stay in any case, best first."""
        n, window = self.layer.keys.shape[1], self._always(first)
        votes = self.layer.attention(n - window, n, n - window).sum(dim=1)
        if first.rule == "tova":
            votes = votes.sum(dim=0, keepdim=True)
        else:
            votes = pooled(votes.unflatten(0, (len(self.layer.keys), -1)).sum(dim=1), "max", first.pool)
        return torch.sort(votes, dim=-1, descending=True, stable=True).indices


def read(second: Second, query: Tensor, keys: Tensor, kept: int) -> Tensor:
    """Choose the tokens that each of M steps reads: query [M,H,D], keys [G,B+M,D] -> mask [G,M,B+M].

    The first `kept` = B keys are the prompt's, step i also sees its own key B+i and those before it.
    """
    steps, total = len(query), keys.shape[1]
    visible = torch.arange(total) <= kept + torch.arange(steps)[:, None]
    grouped = query.transpose(0, 1).reshape(len(keys), -1, steps, query.shape[-1])
    if second.rule == "all":
        return visible.expand(len(keys), steps, total)
    if second.rule == "exact":
        logits = grouped @ keys[:, None].transpose(2, 3) / math.sqrt(query.shape[-1])
        scores = torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1).sum(dim=1)
    elif second.rule == "sparq":
        scores = _token_scores(second, grouped, keys).sum(dim=1)
    else:
        of_pages = _page_scores(second, grouped, keys, kept)
        shares = _token_shares(of_pages, visible, second.page).mean(dim=1)
        scores = shares.repeat_interleave(second.page, dim=-1)[..., :total]
    scores = scores.masked_fill(_newest(second, kept, steps, total), torch.inf)
    return _best(scores.masked_fill(~visible, -torch.inf), second.read) & visible


def unread(second: Second, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor | None:
    """Return the share of attention [H,M] that SparQ's scores leave to unread tokens; None for other rules.

    query [M,H,D], keys [G,B+M,D], mask [G,M,B+M] is true for tokens read."""
    if second.rule != "sparq":
        return None
    (steps, heads, size), (groups, total) = query.shape, keys.shape[:2]
    grouped = query.transpose(0, 1).reshape(groups, -1, steps, size)
    visible = torch.arange(total) <= total - steps + torch.arange(steps)[:, None]
    weights = torch.softmax(_token_scores(second, grouped, keys).masked_fill(~visible, -torch.inf), dim=-1)
    return 1 - (weights * mask[:, None]).sum(dim=-1).reshape(heads, steps)


def _newest(second: Second, kept: int, steps: int, total: int) -> Tensor:
    """Mark the last `second.recent` tokens that each step sees, its own among them: [M,B+M]."""
    return torch.arange(total) > kept + torch.arange(steps)[:, None] - second.recent


def _token_scores(second: Second, grouped: Tensor, keys: Tensor) -> Tensor:
    """Score tokens on the channels where the group's |q| is largest: [G,g,M,D] -> [G,g,M,B+M]."""
    channels = _best(grouped.abs().sum(dim=1), second.channels)[:, None]
    part = grouped * channels
    return part @ keys[:, None].transpose(2, 3) / temperature(part, grouped)[..., None]


def _best(scores: Tensor, count: int) -> Tensor:
    """Mark the best `count` along the last axis, the lowest index first among equals."""
    if count >= scores.shape[-1]:
        return torch.ones(scores.shape, dtype=torch.bool)
    last = scores.topk(count, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, level = scores > last, scores == last
    return above | (level & (level.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)))


def _page_scores(second: Second, grouped: Tensor, keys: Tensor, kept: int) -> Tensor:
    """Score pages on the channels where the group's |q| is largest, for each query head: [G,g,M,D] -> [G,g,M,P]."""
    channels = _best(grouped.abs().sum(dim=1), second.channels)[:, None]
    rising = grouped.sum(dim=1, keepdim=True) > 0
    part = grouped * channels
    return _bounded(part * rising, part * ~rising, keys, kept, second.page) / temperature(part, grouped)[..., None]


def _token_shares(scores: Tensor, visible: Tensor, page: int) -> Tensor:
    """Return the softmax over all tokens that a step sees [M,B+M] of their pages' scores, of one token of each page:
    [G,g,M,P] -> [G,g,M,P]."""
    tokens = torch.nn.functional.pad(visible, (0, scores.shape[-1] * page - visible.shape[-1]))
    count: Tensor = tokens.unflatten(-1, (-1, page)).sum(dim=-1)
    return torch.softmax(scores + count.log(), dim=-1) / count.clamp(min=1)


def _bounded(up: Tensor, down: Tensor, keys: Tensor, kept: int, page: int) -> Tensor:
    """Multiply with a page's largest key (`up`) and smallest one (`down`), of what each step sees: [G,g,M,P]."""
    whole = kept // page
    old = keys[:, : whole * page].unflatten(1, (whole, page))
    fixed = up @ old.amax(dim=2)[:, None].transpose(2, 3) + down @ old.amin(dim=2)[:, None].transpose(2, 3)
    steps, rest = up.shape[2], keys[:, whole * page :]
    short = -rest.shape[1] % page
    rest = torch.nn.functional.pad(rest, (0, 0, 0, short)).unflatten(1, (-1, page))
    slots = whole * page + torch.arange(rest.shape[1] * page).unflatten(0, (-1, page))
    hidden = (slots > kept + torch.arange(steps)[:, None, None])[None, ..., None]
    high = rest[:, None].masked_fill(hidden, -torch.inf).amax(dim=3)
    low = rest[:, None].masked_fill(hidden, torch.inf).amin(dim=3)
    empty = high == -torch.inf
    high, low = high.masked_fill(empty, 0), low.masked_fill(empty, 0)
    moving = (up[..., None, :] * high[:, None] + down[..., None, :] * low[:, None]).sum(dim=-1)
    return torch.cat([fixed, moving], dim=-1)
