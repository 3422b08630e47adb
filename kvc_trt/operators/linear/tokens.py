"""The parts that linear layers' operators share: tensors, and the bodies' convolution, vectors of heads and decays.

Bodies compute in float32 whatever the activations' type. Consecutive value heads share a key head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.models.config import Linear
from kvc_trt.operators.schema import CACHE, FLOAT, Tensor
from kvc_trt.operators.shapes import float32, size
from kvc_trt.operators.tensors import updated

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

KERNEL = "kernel"
"""The name of an engine's number of tokens that the convolution reads."""

MEMORY = Tensor("memory", FLOAT, ("B", "ValueHeads", "KeySize", "ValueSize"), "what each value head has taken in")
LAST_INPUTS = Tensor("last_inputs", CACHE, ("B", "Before", "Channels"), "what the convolution has read of the last")
STATE = (LAST_INPUTS, MEMORY)
"""The state of a row in a linear layer, of one size however many tokens it has taken in; zeros before the first."""
WEIGHTS = (
    Tensor("convolution", CACHE, ("Channels", "One", "Kernel"), "of queries, then keys, then values"),
    Tensor("decay_log", CACHE, ("ValueHeads",), "logarithm of each head's decay"),
    Tensor("decay_bias", CACHE, ("ValueHeads",)),
)


def of_tokens(*rows: str) -> tuple[Tensor, ...]:
    """Return the inputs that hold tokens, whose shapes begin with `rows`."""
    return (
        Tensor("mixed", CACHE, (*rows, "Channels"), "queries, keys and values, before the convolution"),
        Tensor("write", CACHE, (*rows, "ValueHeads"), "its sigmoid is the part of a correction that is written"),
        Tensor("decay", CACHE, (*rows, "ValueHeads")),
    )


def read_of_tokens(*rows: str) -> tuple[Tensor, ...]:
    """Return the outputs of an operator over tokens: the values that the heads read, and the state after the last
    token."""
    return (Tensor("output", CACHE, (*rows, "ValueHeads", "ValueSize")), *map(updated, STATE))


def channel_weights(emit: Emitter) -> Value:
    """Return the weights of the convolution, FLOAT [kernel,channels]."""
    return str(emit.Transpose(emit.Squeeze(float32(emit, "convolution"), [1]), perm=[1, 0]))


def convolved(emit: Emitter, seen: Value, weights: Value, tokens: int, kernel: int) -> Value:
    """Return the activated convolution over `tokens` tokens, FLOAT [B,tokens,channels].

    `seen` FLOAT [B,kernel-1+tokens,channels] begins with the inputs before the first of them."""
    total: Value | None = None
    for place in range(kernel):
        part = emit.Mul(
            emit.Slice(seen, [place], [place + tokens], [1]), emit.Slice(weights, [place], [place + 1], [0])
        )
        total = part if total is None else emit.Add(total, part)
    return str(emit.Mul(total, emit.Sigmoid(total)))


def vectors(emit: Emitter, mixed: Value) -> tuple[Value, Value, Value]:
    """Divide the convolution's result [B,n,channels] into queries and keys of length one and values, by head.

    FLOAT [B,key heads,n,KeySize] twice, and [B,ValueHeads,n,ValueSize]."""
    values = emit.Mul(size(emit, MEMORY.name, 1), size(emit, MEMORY.name, 3))
    keys = emit.Div(emit.Sub(size(emit, mixed, 2), values), 2)
    query, key, value = emit.Split(mixed, emit.Concat(keys, keys, values, axis=0), axis=2, outputs=3)
    query, key = (_of_length_one(emit, _by_head(emit, part, 2)) for part in (query, key))
    return query, key, _by_head(emit, value, 3)


def _by_head(emit: Emitter, rows: Value, axis_of_size: int) -> Value:
    """Reshape [B,n,heads*size] -> [B,heads,n,size], where `size` is that of an axis of the memory."""
    shape = emit.Concat([0, 0, -1], size(emit, MEMORY.name, axis_of_size), axis=0)
    return str(emit.Transpose(emit.Reshape(rows, shape), perm=[0, 2, 1, 3]))


def _of_length_one(emit: Emitter, x: Value) -> Value:
    squares = emit.ReduceSumSquare(x, [-1], keepdims=1)
    return str(emit.Div(x, emit.Sqrt(emit.Add(squares, np.float32(Linear.LENGTH_EPSILON)))))


def log_decays(emit: Emitter) -> Value:
    """Return the logarithm of the share of the memory that stays at each token, FLOAT in the shape of `decay`."""
    steps = emit.Softplus(emit.Add(float32(emit, "decay"), float32(emit, "decay_bias")))
    return str(emit.Neg(emit.Mul(emit.Exp(float32(emit, "decay_log")), steps)))


def written_parts(emit: Emitter) -> Value:
    """Return the part of each token's correction that is written, FLOAT in the shape of `write`."""
    return str(emit.Sigmoid(float32(emit, "write")))


def read_scale(emit: Emitter) -> Value:
    """Return 1/sqrt(KeySize), FLOAT [1]."""
    return str(emit.Reciprocal(emit.Sqrt(float32(emit, size(emit, MEMORY.name, 2)))))
