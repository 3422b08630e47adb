"""A PyTorch model's fp32 products by oneDNN.

PyTorch gives them to MKL, which does not use all of an AMD processor's vector units: on an EPYC (Zen 5) oneDNN takes
half of the time, for one row and for 2,000. Results differ in their last bits.
"""

from __future__ import annotations

from functools import partial

import torch


@torch.inference_mode()
def use_onednn(model: torch.nn.Module) -> None:
    """Replace the products of all linear layers. Their weights are packed, and freed where nothing else reads them."""
    shared = {id(embedding.weight) for embedding in model.modules() if isinstance(embedding, torch.nn.Embedding)}
    for linear in model.modules():
        if isinstance(linear, torch.nn.Linear):
            packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data)
            linear.forward = partial(_product, packed, linear.bias)  # type: ignore[method-assign]
            if id(linear.weight) not in shared:
                linear.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def _product(packed: torch.Tensor, bias: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(values, packed, bias, "none", [], "")
    return product
