"""Gated DeltaNet (Yang et al., arXiv 2412.06464): a linear layer, token by token.

A token decays the state S of a head, corrects the value that S returns for the token's key towards the token's own, and
reads it: S = exp(g) S; S += k (beta (v - S^T k))^T; o = S^T q / sqrt(key size).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvc_trt.models.config import Linear
from kvc_trt.models.weights import (
    CONVOLUTION,
    DECAY,
    DECAY_BIAS,
    LINEAR_INPUTS,
    LINEAR_NORM,
    LINEAR_OUTPUT,
)
from kvc_trt.reference.layers import Weights, rms_norm

Product = Callable[[str, Tensor], Tensor]


@dataclass
class LinearState:
    """The state of one linear layer for B rows, of the same size for any number of tokens."""

    memory: Tensor
    """[B,H,Dk,Dv]: of each value head."""
    inputs: Tensor
    """[B,kernel-1,channels]: the convolution's inputs of the last tokens; zeros before a row's first."""

    @classmethod
    def empty(cls, part: Linear, rows: int, dtype: torch.dtype) -> LinearState:
        """Return the state of rows that have seen nothing."""
        memory = torch.zeros(rows, part.value_heads, part.key_size, part.value_size, dtype=dtype)
        return cls(memory, torch.zeros(rows, part.kernel - 1, part.channels, dtype=dtype))


def linear_attention(
    product: Product, weights: Weights, part: Linear, rows: list[Tensor], state: LinearState, epsilon: float
) -> list[Tensor]:
    """Pass new tokens, one entry [n,hidden] per row, through a linear layer -> [n,hidden] per row.

    The state is changed in place. `product` multiplies by the matrix of a name; `epsilon` is that of the norm of the
    layer's result.
    """
    states = zip(rows, state.memory, state.inputs, strict=True)
    return [_row(product, weights, part, x, memory, inputs, epsilon) for x, memory, inputs in states]


def _row(
    product: Product, weights: Weights, part: Linear, x: Tensor, memory: Tensor, inputs: Tensor, epsilon: float
) -> Tensor:
    query, key, value, gate, write, decay = (product(name, x) for name in LINEAR_INPUTS)
    read = taken_in(weights, part, torch.cat([query, key, value], dim=1), write, decay, memory, inputs)
    normed = rms_norm(read, weights[LINEAR_NORM], epsilon).flatten(1)
    return product(LINEAR_OUTPUT, normed * torch.nn.functional.silu(gate))


def taken_in(
    weights: Weights, part: Linear, x: Tensor, write: Tensor, decay: Tensor, memory: Tensor, inputs: Tensor
) -> Tensor:
    """Let one row's state take in n tokens, in place, and read it after each of them -> [n,H,Dv].

    x [n,channels] are queries, keys and values before the convolution, write and decay [n,H] the other products.
    """
    seen = torch.cat([inputs, x])
    inputs.copy_(seen[len(x) :])
    mixed = torch.nn.functional.silu((seen.unfold(0, part.kernel, 1) * weights[CONVOLUTION][:, 0]).sum(-1))
    query, key, value = torch.split(mixed, [part.keys, part.keys, part.values], dim=1)
    shared = part.value_heads // part.key_heads
    query, key = (
        _of_length_one(one.reshape(len(x), part.key_heads, -1)).repeat_interleave(shared, dim=1) for one in (query, key)
    )
    rate = -weights[DECAY].exp() * torch.nn.functional.softplus(decay + weights[DECAY_BIAS])
    values = value.reshape(len(x), part.value_heads, -1)
    return delta_rule(query, key, values, rate, torch.sigmoid(write), memory)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Tensor, memory: Tensor) -> Tensor:
    """Let a state [H,Dk,Dv] take in n tokens, in place, and read it after each of them -> [n,H,Dv].

    query, key [n,H,Dk] of length one, value [n,H,Dv]; decay [n,H], the logarithm of the share of the state that stays;
    write [n,H], the part of the correction that is written.
    """
    output = torch.empty_like(value)
    scale = query.shape[-1] ** -0.5
    for i, stays in enumerate(decay.exp()):
        memory *= stays[:, None, None]
        known = (memory * key[i, :, :, None]).sum(dim=1)
        memory += key[i, :, :, None] * (write[i, :, None] * (value[i] - known))[:, None]
        output[i] = (memory * query[i, :, :, None]).sum(dim=1) * scale
    return output


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + Linear.LENGTH_EPSILON)
