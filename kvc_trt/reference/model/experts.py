"""A feed-forward block of experts, token by token: the rule of `kvc_trt/operators/experts.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvc_trt.models.config import ClampedGate, Experts
from kvc_trt.models.weights import EXPERT_BIASES, EXPERT_MATRICES, ROUTER, ROUTER_BIAS, SHARED_EXPERT, SHARED_GATE
from kvc_trt.reference.layers import Weights
from kvc_trt.reference.selection import best

Route = Callable[[Tensor], Tensor]
"""Chooses experts, int64 [N,chosen], by router logits [N,experts]."""


def mixed(
    weights: Weights, x: Tensor, part: Experts, clamped: ClampedGate | None = None, route: Route | None = None
) -> Tensor:
    """Apply a layer's experts, and the one that reads every token: [N,hidden] -> [N,hidden].

    With a `clamped` gate, router and experts have biases. A `route` chooses experts in place of the largest logits."""
    logits = x @ weights[ROUTER].T
    if clamped is not None:
        logits = logits + weights[ROUTER_BIAS]
    chosen, shares = routed(logits, part.chosen, normalised=part.normalised, route=route)
    gate, up, down = (torch.unflatten(weights[name], 0, (part.count, -1)) for name in EXPERT_MATRICES)
    result = torch.zeros_like(x)
    for expert in torch.unique(chosen).tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        matrices = gate[expert], up[expert], down[expert]
        if clamped is None:
            own = _gated(x[tokens], *matrices)
        else:
            biases = [torch.unflatten(weights[name], 0, (part.count, -1))[expert] for name in EXPERT_BIASES]
            own = _clamped(x[tokens], matrices, biases, clamped)
        result[tokens] += own * shares[tokens, places, None]
    if not part.shared_size:
        return result
    shared = (weights[f"{SHARED_EXPERT}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return result + _gated(x, *shared) * torch.sigmoid(x @ weights[SHARED_GATE].T)


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Apply one expert [N,hidden] -> [N,hidden] (SwiGLU, arXiv 2002.05202)."""
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _clamped(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor], part: ClampedGate) -> Tensor:
    """Apply one expert with biases and a clamped gate: [N,hidden] -> [N,hidden]."""
    gate, up = (x @ matrix.T + bias for matrix, bias in zip(matrices[:2], biases[:2], strict=True))
    gate, up = gate.clamp(max=part.limit), up.clamp(-part.limit, part.limit)
    return (gate * torch.sigmoid(part.gain * gate) * (up + 1)) @ matrices[2].T + biases[2]


def routed(logits: Tensor, count: int, *, normalised: bool, route: Route | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 [N,count], and their weights, from logits [N,experts]."""
    chosen = best(logits, count) if route is None else route(logits)
    shares = torch.softmax(logits, dim=-1).gather(1, chosen)
    return chosen, shares / shares.sum(dim=-1, keepdim=True) if normalised else shares
