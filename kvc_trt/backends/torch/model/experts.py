"""A feed-forward block of experts in PyTorch: the rule of `kvc_trt/operators/experts.py`, by grouped products.

Many tokens are grouped by expert, and the host waits for the groups' sizes. A step may not wait, and what it makes of a
token may not depend on the tokens beside it, as sums over a group's rows do. So it gathers the matrices of each token's
experts and multiplies them in one batched product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kvc_trt.backends.torch.memory import STEP_TOKENS
from kvc_trt.models.weights import EXPERT_MATRICES, ROUTER, SHARED_EXPERT, SHARED_GATE
from kvc_trt.reference.layers import linear

if TYPE_CHECKING:
    from kvc_trt.backends.torch.model.weights import Layer
    from kvc_trt.models.config import Experts

_DOWN = EXPERT_MATRICES[2]
_GATE_UP = "mlp.experts.gate_up_proj.weight"


def mixed(weights: Layer, x: Tensor, part: Experts) -> Tensor:
    """Apply a layer's experts, and the one that reads every token: [N,hidden] -> [N,hidden]."""
    chosen, shares = routed(weights[ROUTER], x, part)
    compute = gathered if len(x) <= STEP_TOKENS else grouped
    result = compute(weights, x, part, chosen, shares)
    if not part.shared_size:
        return result
    gate, up = linear(weights, f"{SHARED_EXPERT}.gate_up_proj", x).chunk(2, dim=-1)
    shared = linear(weights, f"{SHARED_EXPERT}.down_proj", functional.silu(gate) * up)
    return result + shared * torch.sigmoid(functional.linear(x, weights[SHARED_GATE]))


def routed(router: Tensor, x: Tensor, part: Experts) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 [N,chosen], and their weights, float32."""
    logits = x.float() @ router.float().T
    chosen = logits.sort(dim=1, descending=True, stable=True).indices[:, : part.chosen]
    shares = logits.softmax(dim=1).gather(1, chosen)
    return chosen, shares / shares.sum(dim=1, keepdim=True) if part.normalised else shares


def grouped(weights: Layer, x: Tensor, part: Experts, chosen: Tensor, shares: Tensor) -> Tensor:
    """Add up what each expert makes of its tokens, expert by expert: no other expert's matrices are read."""
    gates, ups = _gates_and_ups(weights, part)
    downs = weights[_DOWN].view(part.count, -1, part.size)
    order = chosen.flatten().sort(stable=True).indices
    counts = torch.bincount(chosen.flatten(), minlength=part.count).tolist()
    result, first = torch.zeros_like(x, dtype=torch.float32), 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        places = order[first : first + count]
        first += count
        tokens = places // part.chosen
        rows = x[tokens]
        inner = functional.silu(functional.linear(rows, gates[expert])) * functional.linear(rows, ups[expert])
        own = functional.linear(inner, downs[expert])
        result.index_add_(0, tokens, own.float() * shares.flatten()[places, None])
    return result.to(x.dtype)


def gathered(weights: Layer, x: Tensor, part: Experts, chosen: Tensor, shares: Tensor) -> Tensor:
    """Add up what each token's experts make of it, from copies of their matrices: shapes are those of the tokens."""
    gates, ups = (whole[chosen] for whole in _gates_and_ups(weights, part))
    downs = weights[_DOWN].view(part.count, -1, part.size)[chosen]
    column = x[:, None, :, None]
    inner = functional.silu(gates @ column) * (ups @ column)
    own = (downs @ inner).squeeze(-1)
    return (own.float() * shares[..., None]).sum(dim=1).to(x.dtype)


def _gates_and_ups(weights: Layer, part: Experts) -> tuple[Tensor, Tensor]:
    gates, ups = weights[_GATE_UP].view(2, part.count, part.size, -1)
    return gates, ups
