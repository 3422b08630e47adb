"""A feed-forward block of experts, token by token: the rule of `kvc_trt/operators/experts.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvc_trt.models.config import Experts
from kvc_trt.models.weights import EXPERT_MATRICES, ROUTER, SHARED_EXPERT, SHARED_GATE
from kvc_trt.reference.layers import Weights
from kvc_trt.reference.selection import best


def mixed(weights: Weights, x: Tensor, part: Experts) -> Tensor:
    """Apply a layer's experts, and the one that reads every token: [N,hidden] -> [N,hidden]."""
    chosen, shares = routed(x @ weights[ROUTER].T, part.chosen, normalised=part.normalised)
    gate, up, down = (torch.unflatten(weights[name], 0, (part.count, -1)) for name in EXPERT_MATRICES)
    result = torch.zeros_like(x)
    for expert in torch.unique(chosen).tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        own = _gated(x[tokens], gate[expert], up[expert], down[expert])
        result[tokens] += own * shares[tokens, places, None]
    if not part.shared_size:
        return result
    matrices = (weights[f"{SHARED_EXPERT}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return result + _gated(x, *matrices) * torch.sigmoid(x @ weights[SHARED_GATE].T)


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Apply one expert [N,hidden] -> [N,hidden] (SwiGLU, arXiv 2002.05202)."""
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def routed(logits: Tensor, count: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 [N,count], and their weights, from logits [N,experts]."""
    chosen = best(logits, count)
    shares = torch.softmax(logits, dim=-1).gather(1, chosen)
    return chosen, shares / shares.sum(dim=-1, keepdim=True) if normalised else shares
