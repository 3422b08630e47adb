"""KvcLayerBudgets: how much of one prompt each layer keeps (SqueezeAttention, arXiv 2404.04793).

The exact division of `kvc_trt.reference.model.squeeze` in double precision, for each row of the batch separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.schema import FLOAT, INT64, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import Layout, one
from kvc_trt.operators.tensors import PROMPT_LENGTHS

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body. The layout's numbers `budgeted_layers` and `squeeze_share` are L and p of SqueezeAttention.

    Budgets are between `least` and min(`most`, prompt length), and sum to L * `budget` if there is room for all of it.
    """
    layers, share = int(layout.number("budgeted_layers")), layout.number("squeeze_share")
    values = emit.cast(emit.Transpose("cosines", perm=[1, 0]), np.float64)
    ascending, order = emit.TopK(values, [layers], outputs=2, axis=1, largest=0)
    important = _important(emit, ascending, layers)
    budget = emit.attribute("budget")
    low = emit.Max(emit.attribute("least"), _floor_share(emit, budget, share))
    others = emit.Sub(layers, important)
    rest = emit.Sub(emit.Mul(budget, layers), emit.Mul(others, low))
    base = emit.Div(rest, important)
    extra = emit.Sub(rest, emit.Mul(base, important))
    places = np.arange(layers, dtype=np.int64)[None]
    share_of_rest = emit.Add(base, emit.cast(emit.Less(places, extra), np.int64))
    wanted = emit.Where(emit.Less(places, important), share_of_rest, low)
    room = emit.Unsqueeze(emit.Min("prompt_lengths", emit.attribute("most")), [1])
    ranked = _spread(emit, wanted, room)
    _, back = emit.TopK(order, [layers], outputs=2, axis=1, largest=0)
    return {"budgets": emit.Transpose(emit.GatherElements(ranked, back, axis=1), perm=[1, 0])}


def _floor_share(emit: Emitter, budget: Value, share: float) -> Value:
    """Return floor(budget * share), computed as Python does."""
    product = emit.Mul(emit.cast(budget, np.float64), np.float64(share))
    return emit.cast(emit.Floor(product), np.int64)


def _important(emit: Emitter, values: Value, layers: int) -> Value:
    """Count the layers below the highest of three clusters of ascending `values` [B,L]; -> INT64 [B,1], at least 1.

    Every pair of cuts (i, j) has a cost, infinite if a cut would divide equal values; the first cheapest pair wins.
    With fewer than two possible cuts it is the only one, or all layers.
    """
    if layers == 1:
        return str(emit.Expand(one(emit, emit.constant(1)), emit.Concat(emit.Shape(values, end=1), [1], axis=0)))
    distinct = emit.Greater(emit.Slice(values, [1], [layers], [1]), emit.Slice(values, [0], [layers - 1], [1]))
    cuts = emit.ReduceSum(emit.cast(distinct, np.int64), [1])
    first_cut = emit.Add(emit.ArgMax(emit.cast(distinct, np.int32), axis=1, keepdims=1), 1)
    few = emit.Where(emit.Equal(cuts, 0), np.int64(layers), first_cut)
    if layers == 2:
        return str(few)
    pairs = np.array([(i, j) for i in range(1, layers) for j in range(i + 1, layers)], np.int64)
    cost = _cost(emit, values, pairs, layers)
    allowed = emit.And(*(emit.Gather(distinct, pairs[:, side] - 1, axis=1) for side in (0, 1)))
    best = emit.ArgMin(emit.Where(allowed, cost, np.float64(np.inf)), axis=1, keepdims=1)
    return str(emit.Where(emit.Less(cuts, 2), few, emit.Gather(pairs[:, 1], best)))


def _cost(emit: Emitter, values: Value, pairs: np.ndarray, layers: int) -> Value:
    """Return the sum of squared deviations within the three segments of each pair of cuts, DOUBLE [B,pairs]."""
    running = [
        emit.Pad(emit.CumSum(terms, 1), [1, 0], np.float64(0), [1]) for terms in (values, emit.Mul(values, values))
    ]
    zero, end = np.zeros(len(pairs), np.int64), np.full(len(pairs), layers, np.int64)
    edges = [zero, pairs[:, 0], pairs[:, 1], end]
    costs = []
    for start, stop in pairwise(edges):
        total, squares = (emit.Sub(*(emit.Gather(sums, edge, axis=1) for edge in (stop, start))) for sums in running)
        count = (stop - start).astype(np.float64)[None]
        costs.append(emit.Sub(squares, emit.Div(emit.Mul(total, total), count)))
    return str(emit.Add(emit.Add(costs[0], costs[1]), costs[2]))


def _spread(emit: Emitter, wanted: Value, room: Value) -> Value:
    """Cut `wanted` [B,L] to `room` [B,1]; the surplus goes to the first layers that have room."""
    held = emit.Min(wanted, room)
    surplus = emit.ReduceSum(emit.Sub(wanted, held), [1])
    free = emit.Sub(room, held)
    given_before = emit.CumSum(free, 1, exclusive=1)
    left = emit.Max(emit.Sub(surplus, given_before), 0)
    return str(emit.Add(held, emit.Min(free, left)))


LAYER_BUDGETS = Operator(
    name="KvcLayerBudgets",
    summary="How much of one prompt each layer keeps.",
    inputs=(Tensor("cosines", FLOAT, ("L", "B"), "how little each layer changes the residual stream"), PROMPT_LENGTHS),
    outputs=(Tensor("budgets", INT64, ("L", "B")),),
    attributes=(
        Attribute("budget", summary="tokens kept per layer, on average"),
        Attribute("least", summary="fewest tokens that a layer keeps"),
        Attribute("most", summary="most tokens that a layer keeps"),
    ),
    write=_write,
)
