"""SqueezeAttention: layers that change the residual stream little give cache to those that change it much.

"SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal Budget", arXiv 2404.04793. The
cosine between the residual stream before and after a layer's attention says how little the layer matters; the cosines
of all layers are divided into three clusters, the layers of the highest one keep `share` of the budget, and what they
give up is divided evenly among the others.

Deviations: the clusters are the exact one-dimensional optimum (published: k-means from random starts), so equal inputs
give equal budgets; integer budgets sum exactly to layers x budget (published: truncated); budgets are held within
[minimum, maximum], and what a full layer cannot take goes to the most important layers with room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LayerBudgets(NamedTuple):
    """What every layer may keep."""

    budgets: tuple[int, ...]
    """Tokens per KV head, by layer."""
    unplaced: int
    """Tokens that no layer had room for."""


def squeeze(cosines: Sequence[float], budget: int, *, share: float, minimum: int, maximum: int) -> LayerBudgets:
    """Divide layers x `budget` tokens among layers by their `cosines`; a budget lies in minimum..maximum.

    `minimum` <= `budget`. Ties between layers go to the lower one. Pure, in the layers' order.
    """
    layers = len(cosines)
    ranked = sorted(range(layers), key=lambda layer: (cosines[layer], layer))
    cut = unimportant_from([cosines[layer] for layer in ranked])
    important, others = ranked[:cut], ranked[cut:]
    low = max(minimum, int(budget * share)) if others else 0
    base, extra = divmod(layers * budget - len(others) * low, len(important))
    budgets = dict.fromkeys(others, low)
    budgets.update((layer, base + (place < extra)) for place, layer in enumerate(important))
    surplus = sum(max(0, tokens - maximum) for tokens in budgets.values())
    for layer in ranked:
        held = min(budgets[layer], maximum)
        given = min(surplus, maximum - held)
        budgets[layer], surplus = held + given, surplus - given
    return LayerBudgets(tuple(budgets[layer] for layer in range(layers)), surplus)


def unimportant_from(values: Sequence[float]) -> int:
    """Where the highest of three clusters of ascending `values` begins; their number if there is nothing to divide.

    The clusters have the least sum of squared deviations from their means; cuts lie between distinct values only, the
    first pair of cuts wins a tie. Of two distinct values the higher is the cluster, of one there is none.
    """
    count = len(values)
    cuts = [i for i in range(1, count) if values[i] != values[i - 1]]
    if len(cuts) < 2:
        return cuts[0] if cuts else count
    pairs = [(i, j) for place, i in enumerate(cuts) for j in cuts[place + 1 :]]
    deviation = _Deviations(values)
    return min(pairs, key=lambda pair: deviation(0, pair[0]) + deviation(*pair) + deviation(pair[1], count))[1]


class _Deviations:
    """Sums of squared deviations from the mean of any segment, from running sums in double precision."""

    def __init__(self, values: Sequence[float]) -> None:
        self._sums, self._squares = [0.0], [0.0]
        for value in values:
            self._sums.append(self._sums[-1] + value)
            self._squares.append(self._squares[-1] + value * value)

    def __call__(self, start: int, end: int) -> float:
        total = self._sums[end] - self._sums[start]
        return self._squares[end] - self._squares[start] - total * total / (end - start)
