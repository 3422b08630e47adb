"""Linear layers (Gated DeltaNet, Yang et al., arXiv 2412.06464) in PyTorch: steps of one token, prompts by chunks.

The values that the tokens of a chunk write follow from a triangular system (section 3.3). It is solved for all chunks
of a block at once; the memory then passes from chunk to chunk. All of it is computed in float32, and padding decays
nothing and writes nothing. `kvc_trt/operators/linear` has the same rule as standard operators; here nothing waits for
the device, so that steps can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvc_trt.models.config import Linear
from kvc_trt.models.weights import CONVOLUTION, DECAY, DECAY_BIAS, LINEAR, LINEAR_GATE, LINEAR_NORM, LINEAR_OUTPUT
from kvc_trt.operators.linear.delta_rule import CHUNK
from kvc_trt.reference.layers import linear

if TYPE_CHECKING:
    from kvc_trt.backends.torch.model.weights import Layer

JOINED_INPUTS = f"{LINEAR}.qkvba_proj"
"""The matrices of queries, keys, values, and of the numbers of each value head, one under the other."""


class LinearRows(NamedTuple):
    """The state of rows in a linear layer, updated in place."""

    inputs: Tensor
    """[B,kernel-1,channels]: the convolution's inputs of the last tokens."""
    memory: Tensor
    """float32 [B,H,Dk,Dv]"""

    @classmethod
    def empty(cls, part: Linear, rows: int, like: Tensor) -> LinearRows:
        """Return the state of rows without a token; its inputs have the type of `like`."""
        memory = like.new_zeros((rows, part.value_heads, part.key_size, part.value_size), dtype=torch.float32)
        return cls(like.new_zeros(rows, part.kernel - 1, part.channels), memory)


class LinearInputs(NamedTuple):
    """The inputs of a linear layer for tokens, one of each row [B,.] or several [B,n,.]."""

    mixed: Tensor
    """[...,channels]: queries, keys and values before the convolution."""
    write: Tensor
    """[...,H]: its sigmoid is the part of a correction that is written."""
    decay: Tensor
    """[...,H]"""


def linear_inputs(weights: Layer, part: Linear, x: Tensor) -> LinearInputs:
    """Project normed tokens x [...,hidden]."""
    joined = linear(weights, JOINED_INPUTS, x)
    return LinearInputs(*torch.split(joined, [part.channels, part.value_heads, part.value_heads], dim=-1))


def take_token(weights: Layer, part: Linear, inputs: LinearInputs, state: LinearRows, active: Tensor) -> Tensor:
    """Update each row of `active` [B] with one token, and return the values read from its memory after it: [B,H*Dv]."""
    mixed, write, decay = (one[:, None] for one in inputs)
    seen = torch.cat([state.inputs.to(mixed.dtype), mixed], dim=1)
    query, key, value = _vectors(part, _convolved(weights, part, seen))
    stays, written = _log_decays(weights, decay).exp(), torch.sigmoid(write.float())
    decayed = state.memory * stays[:, 0, :, None, None]
    column = key.transpose(2, 3)
    after = decayed + column * ((value - key @ decayed) * written[:, 0, :, None, None])
    state.memory.copy_(torch.where(active[:, None, None, None], after, state.memory))
    state.inputs.copy_(torch.where(active[:, None, None], seen[:, 1:].to(state.inputs.dtype), state.inputs))
    return (query @ after).flatten(1).mul(part.key_size**-0.5).to(mixed.dtype)


def take_tokens(weights: Layer, part: Linear, inputs: LinearInputs, state: LinearRows, lengths: Tensor) -> Tensor:
    """Update each row with its first `lengths` [B] of n tokens; return the values read from its memory: [B,n,H*Dv]."""
    mixed, write, decay = inputs
    seen = torch.cat([state.inputs.to(mixed.dtype), mixed], dim=1)
    _keep_last(state.inputs, seen, lengths)
    query, key, value = _vectors(part, _convolved(weights, part, seen))
    real = (torch.arange(mixed.shape[1], device=mixed.device) < lengths[:, None])[..., None]
    numbers = _log_decays(weights, decay), torch.sigmoid(write.float())
    by_head = [torch.where(real, one, 0).transpose(1, 2) for one in numbers]
    read = _delta_rule(query, key, value, by_head[0], by_head[1], state.memory)
    return read.transpose(1, 2).flatten(2).mul(part.key_size**-0.5).to(mixed.dtype)


def gated_output(weights: Layer, part: Linear, read: Tensor, x: Tensor, epsilon: float) -> Tensor:
    """Return the layer's output [N,hidden] from the values that it read from memory [N,H*Dv] and the normed stream
    x."""
    rows = read.view(len(read), part.value_heads, part.value_size)
    normed = functional.rms_norm(rows, (part.value_size,), weights[LINEAR_NORM], epsilon)
    gate = functional.silu(linear(weights, LINEAR_GATE, x))
    return linear(weights, LINEAR_OUTPUT, normed.flatten(1) * gate)


def _keep_last(inputs: Tensor, seen: Tensor, lengths: Tensor) -> None:
    """Store the convolution's inputs of the last tokens: `seen` has the stored ones, then `lengths` [B] new ones."""
    places = lengths[:, None] + torch.arange(inputs.shape[1], device=seen.device)
    inputs.copy_(seen.gather(1, places[..., None].expand(*places.shape, seen.shape[2])))


def _convolved(weights: Layer, part: Linear, seen: Tensor) -> Tensor:
    """Return the activated convolution over all but the first kernel-1 tokens of `seen` [B,.,channels], float32."""
    kernel, count = weights[CONVOLUTION].float()[:, 0], seen.shape[1] - part.kernel + 1
    seen = seen.float()
    total = seen[:, :count] * kernel[:, 0]
    for place in range(1, part.kernel):
        total = total.addcmul(seen[:, place : place + count], kernel[:, place])
    return functional.silu(total)


def _vectors(part: Linear, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divide [B,n,channels] into queries and keys of length one [B,H,n,Dk], and values [B,H,n,Dv]."""
    query, key, value = torch.split(mixed, [part.keys, part.keys, part.values], dim=-1)
    shared = part.value_heads // part.key_heads

    def of_length_one(rows: Tensor) -> Tensor:
        rows = rows.view(*rows.shape[:2], part.key_heads, part.key_size).transpose(1, 2)
        rows = rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + Linear.LENGTH_EPSILON)
        return rows.repeat_interleave(shared, dim=1)

    return of_length_one(query), of_length_one(key), value.view(*value.shape[:2], part.value_heads, -1).transpose(1, 2)


def _log_decays(weights: Layer, decay: Tensor) -> Tensor:
    """Return the logarithm of the memory's decay factor at each token, float32 in the shape of `decay` [...,H]."""
    return -weights[DECAY].float().exp() * functional.softplus(decay.float() + weights[DECAY_BIAS].float())


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Tensor, memory: Tensor) -> Tensor:
    """Update the memory [B,H,Dk,Dv] with n tokens in place, and return the values read after each: [B,H,n,Dv].

    query, key [B,H,n,Dk], value [B,H,n,Dv]; decay, the logarithm of the decay factor, and write [B,H,n].
    """
    batch, heads, count, _ = query.shape
    missing = -count % CHUNK
    chunks = batch, heads, (count + missing) // CHUNK, CHUNK
    query, key, value = (
        functional.pad(one, (0, 0, 0, missing)).view(*chunks, one.shape[-1]) for one in (query, key, value)
    )
    decay, write = (functional.pad(one, (0, missing)).view(*chunks) for one in (decay, write))
    total = decay.cumsum(dim=-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    since = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    transposed, writing = key.transpose(-1, -2), write[..., None]
    system = (key @ transposed) * since * writing
    # The values that a chunk's tokens would write into an empty memory, and the part of a full one that they take back.
    since_start = total.exp()[..., None]
    sides = torch.cat([value * writing, key * (since_start * writing)], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, taken_back = torch.split(solved, [value.shape[-1], key.shape[-1]], dim=-1)
    among, from_start = (query @ transposed) * since, query * since_start
    to_end = transposed * (total[..., -1:] - total).exp()[..., None, :]
    stays = total[..., -1].exp()[..., None, None]
    read = torch.empty_like(value)
    for chunk in range(query.shape[2]):
        corrections = own[:, :, chunk] - taken_back[:, :, chunk] @ memory
        read[:, :, chunk] = from_start[:, :, chunk] @ memory + among[:, :, chunk] @ corrections
        memory.mul_(stays[:, :, chunk]).add_(to_end[:, :, chunk] @ corrections)
    return read.flatten(2, 3)[:, :, :count]
