"""SqueezeAttention: layers that change the residual stream little give cache to layers that change it a lot.

"SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal Budget", arXiv 2404.04793. The
cosine between the residual stream before and after a layer's attention is high if the layer matters little. The cosines
of all layers form three clusters; the layers of the highest one keep `share` of the budget, and the rest of theirs is
divided evenly among the others.

Deviations: the clusters are the exact one-dimensional optimum (published: k-means from random starts), so equal inputs
give equal budgets; integer budgets sum exactly to layers x budget (published: truncated); budgets are held within
[minimum, maximum], and the surplus of a full layer goes to the most important layers with room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LayerBudgets(NamedTuple):
    """The budget of every layer."""

    budgets: tuple[int, ...]
    """Tokens per KV head, by layer."""
    unplaced: int
    """Tokens that no layer had room for."""


def squeeze(cosines: Sequence[float], budget: int, *, share: float, minimum: int, maximum: int) -> LayerBudgets:
    """Divide layers x `budget` tokens among layers by their `cosines`; each budget is in minimum..maximum.

    `minimum` <= `budget`. Ties go to the lower layer. Returns the budgets in layer order.
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
    """Return where the highest of three clusters of ascending `values` begins; len(values) if they cannot be divided.

    Of two distinct values the higher forms the cluster; one value forms none.
    """
    return _cuts(values)[1]


def groups(cosines: Sequence[float]) -> tuple[int, ...]:
    """Return the group of every layer: 1 (G1, the lowest cosines) to 3 (G3, the layers that give up cache).

    With two distinct cosines there is no group 2, and with one all layers are of group 1.
    """
    ranked = sorted(range(len(cosines)), key=lambda layer: (cosines[layer], layer))
    middle, highest = _cuts([cosines[layer] for layer in ranked])
    place = {layer: position for position, layer in enumerate(ranked)}
    return tuple(1 + (place[layer] >= middle) + (place[layer] >= highest) for layer in range(len(cosines)))


def _cuts(values: Sequence[float]) -> tuple[int, int]:
    """Return where the middle and the highest of three clusters of ascending `values` begin.

    The clusters minimise the sum of squared deviations from their means. Cuts are between distinct values only; the
    first pair of cuts wins a tie. A cluster that there is not begins where the next one does, or at len(values).
    """
    count = len(values)
    cuts = [i for i in range(1, count) if values[i] != values[i - 1]]
    if len(cuts) < 2:
        return (cuts[0], cuts[0]) if cuts else (count, count)
    pairs = [(i, j) for place, i in enumerate(cuts) for j in cuts[place + 1 :]]
    deviation = _Deviations(values)
    return min(pairs, key=lambda pair: deviation(0, pair[0]) + deviation(*pair) + deviation(pair[1], count))


class _Deviations:
    """Sum of squared deviations from the mean for any segment, from running sums in double precision."""

    def __init__(self, values: Sequence[float]) -> None:
        self._sums, self._squares = [0.0], [0.0]
        for value in values:
            self._sums.append(self._sums[-1] + value)
            self._squares.append(self._squares[-1] + value * value)

    def __call__(self, start: int, end: int) -> float:
        total = self._sums[end] - self._sums[start]
        return self._squares[end] - self._squares[start] - total * total / (end - start)
