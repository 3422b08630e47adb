"""A feed-forward block of experts in PyTorch: the rule of `kvc_trt/operators/experts.py`, by grouped products.

Many tokens are grouped by expert, and the host waits for the sizes of the groups. A step must not wait, and a token's
result must not depend on the tokens beside it, as it would in products of a whole group. So a step gathers the matrices
of each token's experts and multiplies them in one batched product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kvc_trt.backends.torch.memory import STEP_TOKENS
from kvc_trt.models.weights import EXPERT_BIASES, EXPERT_MATRICES, ROUTER, ROUTER_BIAS, SHARED_EXPERT, SHARED_GATE
from kvc_trt.reference.layers import linear

if TYPE_CHECKING:
    from kvc_trt.backends.torch.model.weights import Layer
    from kvc_trt.models.config import ClampedGate, Experts

_DOWN = EXPERT_MATRICES[2]
_GATE_UP = "mlp.experts.gate_up_proj.weight"
_GATE_UP_BIAS, _DOWN_BIAS = "mlp.experts.gate_up_proj.bias", EXPERT_BIASES[2]


def mixed(weights: Layer, x: Tensor, part: Experts, clamped: ClampedGate | None = None) -> Tensor:
    """Apply a layer's experts, and the one that reads every token: [N,hidden] -> [N,hidden].

    With a `clamped` gate, router and experts have biases."""
    chosen, shares = routed(weights[ROUTER], x, part, weights.get(ROUTER_BIAS))
    compute = gathered if len(x) <= STEP_TOKENS else grouped
    result = compute(weights, x, part, chosen, shares, clamped)
    if not part.shared_size:
        return result
    gate, up = linear(weights, f"{SHARED_EXPERT}.gate_up_proj", x).chunk(2, dim=-1)
    shared = linear(weights, f"{SHARED_EXPERT}.down_proj", functional.silu(gate) * up)
    return result + shared * torch.sigmoid(functional.linear(x, weights[SHARED_GATE]))


def routed(router: Tensor, x: Tensor, part: Experts, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 [N,chosen], and their weights, float32."""
    logits = functional.linear(x.float(), router.float(), None if bias is None else bias.float())
    chosen = logits.sort(dim=1, descending=True, stable=True).indices[:, : part.chosen]
    shares = logits.softmax(dim=1).gather(1, chosen)
    return chosen, shares / shares.sum(dim=1, keepdim=True) if part.normalised else shares


def grouped(
    weights: Layer, x: Tensor, part: Experts, chosen: Tensor, shares: Tensor, clamped: ClampedGate | None = None
) -> Tensor:
    """Add up the results of the experts, expert by expert, each for all its tokens; unused experts are not read."""
    gates, ups = _gates_and_ups(weights, part)
    downs, biases = weights[_DOWN].view(part.count, -1, part.size), _biases(weights, part)
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
        of_gate, of_up, of_down = (None if one is None else one[expert] for one in biases)
        gate, up = functional.linear(rows, gates[expert], of_gate), functional.linear(rows, ups[expert], of_up)
        own = functional.linear(_activated(gate, up, clamped), downs[expert], of_down)
        result.index_add_(0, tokens, own.float() * shares.flatten()[places, None])
    return result.to(x.dtype)


def gathered(
    weights: Layer, x: Tensor, part: Experts, chosen: Tensor, shares: Tensor, clamped: ClampedGate | None = None
) -> Tensor:
    """Add up the results of each token's experts, from copies of their matrices; the tokens' number sets all shapes."""
    gates, ups = (whole[chosen] for whole in _gates_and_ups(weights, part))
    downs = weights[_DOWN].view(part.count, -1, part.size)[chosen]
    column = x[:, None, :, None]
    of_gate, of_up, of_down = (None if one is None else one[chosen] for one in _biases(weights, part))
    inner = _activated(_product(gates, column, of_gate), _product(ups, column, of_up), clamped)
    own = _product(downs, inner[..., None], of_down)
    return (own.float() * shares[..., None]).sum(dim=1).to(x.dtype)


def _product(matrices: Tensor, column: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply and add a bias, if there is one: [N,chosen,out,in], [N,1 or chosen,in,1] -> [N,chosen,out]."""
    product = (matrices @ column).squeeze(-1)
    return product if bias is None else product + bias


def _activated(gate: Tensor, up: Tensor, clamped: ClampedGate | None) -> Tensor:
    """Return the gated values that an expert's last matrix multiplies; `gate` may be overwritten."""
    if clamped is None:
        return functional.silu(gate, inplace=True) * up
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return gate * torch.sigmoid(clamped.gain * gate) * (up + 1)


def _biases(weights: Layer, part: Experts) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the biases [experts,out] of gate, up and down, each None if there are none."""
    if _DOWN_BIAS not in weights:
        return None, None, None
    gates, ups = weights[_GATE_UP_BIAS].view(2, part.count, part.size)
    return gates, ups, weights[_DOWN_BIAS].view(part.count, -1)


def _gates_and_ups(weights: Layer, part: Experts) -> tuple[Tensor, Tensor]:
    gates, ups = weights[_GATE_UP].view(2, part.count, part.size, -1)
    return gates, ups
