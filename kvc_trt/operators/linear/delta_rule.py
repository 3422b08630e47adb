"""KvcDeltaRule: a linear layer takes in many tokens of each row, and is read after each of them.

Tokens are taken in by chunks (Yang et al., arXiv 2412.06464, section 3.3; 2406.06484 for the form): the values that
each token of a chunk writes follow from a triangular system, and the memory is read and written once for all of them.
The system's matrix is inverted by halves: [[A,0],[C,B]] has the inverse [[A',0],[-B'CA',B']], and blocks of one token
are 1. That is forward substitution in another order. A sum of powers would be fewer products, but keys that repeat make
the powers grow far beyond the inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt.operators.linear.tokens import (
    KERNEL,
    LAST_INPUTS,
    MEMORY,
    STATE,
    WEIGHTS,
    channel_weights,
    convolved,
    log_decays,
    of_tokens,
    read_of_tokens,
    read_scale,
    vectors,
    written_parts,
)
from kvc_trt.operators.schema import INT64, Operator, Tensor
from kvc_trt.operators.shapes import Layout, count_to, float32, one, scalar, size

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

CHUNK = 64
"""Tokens of a chunk, a power of two."""


@dataclass(frozen=True)
class _Tokens:
    """All tokens of the rows, padded to whole chunks; padding decays nothing and writes nothing."""

    seen: Value
    """[B,kernel-1+n,channels]: the convolution's inputs, those before the first token included."""
    log_decay: Value
    """FLOAT [B,ValueHeads,n]"""
    written: Value
    """FLOAT [B,ValueHeads,n]"""
    convolution: Value
    """FLOAT [kernel,channels]"""
    kernel: int


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcDeltaRule."""
    kernel, count = int(layout.number(KERNEL)), size(emit, "mixed", 1)
    chunks = emit.Div(emit.Add(count, CHUNK - 1), CHUNK)
    missing = emit.Sub(emit.Mul(chunks, CHUNK), count)
    seen = emit.Concat(LAST_INPUTS.name, "mixed", axis=1)
    padded = emit.Pad(seen, emit.Concat([0], missing, axis=0), emit.CastLike(np.float32(0), seen), [1])
    real = emit.Unsqueeze(emit.Less(count_to(emit, count), emit.Unsqueeze("lengths", [1])), [2])
    numbers = (emit.Where(real, part, np.float32(0)) for part in (log_decays(emit), written_parts(emit)))
    by_head = (emit.Transpose(part, perm=[0, 2, 1]) for part in numbers)
    log_decay, written = (emit.Pad(part, emit.Concat([0], missing, axis=0), np.float32(0), [2]) for part in by_head)
    tokens = _Tokens(padded, log_decay, written, channel_weights(emit), kernel)

    scale = read_scale(emit)

    def chunk(body: Emitter, iteration: Value, memory: Value) -> tuple[Value, Value]:
        return _take_in(body, tokens, scale, iteration, memory)

    memory, read = emit.scan(scalar(emit, chunks), MEMORY.name, chunk)
    in_order = emit.Transpose(read, perm=[1, 0, 3, 2, 4])
    every = emit.Reshape(in_order, emit.Concat([0, -1], emit.Shape(in_order, start=3), axis=0))
    output = emit.Slice(every, [0], count, [1])
    last = emit.Add(emit.Unsqueeze("lengths", [1]), np.arange(kernel - 1, dtype=np.int64))
    return {
        "output": emit.CastLike(output, "mixed"),
        "last_inputs_out": emit.GatherND(seen, emit.Unsqueeze(last, [2]), batch_dims=1),
        "memory_out": emit.Identity(memory),
    }


def _take_in(emit: Emitter, tokens: _Tokens, scale: Value, index: Value, memory: Value) -> tuple[Value, Value]:
    """Take in chunk `index`; return the memory after it, and the values read, FLOAT [B,ValueHeads,CHUNK,ValueSize]."""
    first = one(emit, emit.Mul(index, CHUNK))
    end = emit.Add(first, CHUNK)
    seen = float32(emit, emit.Slice(tokens.seen, first, emit.Add(end, tokens.kernel - 1), [1]))
    mixed = convolved(emit, seen, tokens.convolution, CHUNK, tokens.kernel)
    query, key, value = vectors(emit, mixed)
    # One more axis: [B,key heads,value heads of each,...], so that products with keys are computed once for all.
    grouped = emit.Concat([0], size(emit, query, 1), [-1], axis=0)
    by_key = emit.Concat(grouped, emit.Shape(MEMORY.name, start=2), axis=0)
    state = emit.Reshape(memory, by_key)
    value = emit.Reshape(value, emit.Concat(grouped, emit.Shape(value, start=2), axis=0))
    query, key = (emit.Unsqueeze(part, [2]) for part in (query, key))
    decay, written = (
        emit.Reshape(emit.Slice(part, first, end, [2]), emit.Concat(grouped, [CHUNK], axis=0))
        for part in (tokens.log_decay, tokens.written)
    )
    total = emit.CumSum(decay, -1)
    since_start, written = emit.Unsqueeze(emit.Exp(total), [4]), emit.Unsqueeze(written, [4])
    since = emit.Exp(emit.Sub(emit.Unsqueeze(total, [4]), emit.Unsqueeze(total, [3])))
    transposed = emit.Transpose(key, perm=[0, 1, 2, 4, 3])

    def among(rows: Value, kept: NDArray[np.bool_]) -> Value:
        """Return the products of rows with the chunk's keys, decayed since those keys: where `kept`, else 0."""
        return str(emit.Where(kept, emit.Mul(emit.MatMul(rows, transposed), since), np.float32(0)))

    earlier = np.tri(CHUNK, k=-1, dtype=bool)
    inverse = _inverse(emit, emit.Mul(among(key, earlier), written))
    known = emit.Mul(emit.MatMul(key, state), since_start)
    corrections = emit.MatMul(inverse, emit.Mul(emit.Sub(value, known), written))
    own = emit.MatMul(among(query, np.tri(CHUNK, dtype=bool)), corrections)
    read = emit.Mul(emit.Add(emit.Mul(emit.MatMul(query, state), since_start), own), scale)
    last = emit.Slice(total, [CHUNK - 1], [CHUNK], [3])
    to_end = emit.Unsqueeze(emit.Exp(emit.Sub(last, total)), [3])
    added = emit.MatMul(emit.Mul(transposed, to_end), corrections)
    after = emit.Add(emit.Mul(state, emit.Unsqueeze(emit.Exp(last), [4])), added)
    flat = emit.Concat(emit.Shape(MEMORY.name, end=2), emit.Shape(read, start=3), axis=0)
    return emit.Reshape(after, emit.Shape(MEMORY.name)), emit.Reshape(read, flat)


def _inverse(emit: Emitter, below: Value) -> Value:
    """Return the inverse of 1 + `below`, matrices [...,CHUNK,CHUNK] whose other entries are 0."""
    rows, columns = np.indices((CHUNK, CHUNK))
    inverse: Value | None = None
    half = 1
    while half < CHUNK:
        joins = (rows // (2 * half) == columns // (2 * half)) & (rows // half > columns // half)
        corner = emit.Where(joins, below, np.float32(0))
        if inverse is None:
            inverse = emit.Sub(np.eye(CHUNK, dtype=np.float32), corner)
        else:
            inverse = emit.Sub(inverse, emit.MatMul(emit.MatMul(inverse, corner), inverse))
        half *= 2
    assert inverse is not None, "a chunk has several tokens"
    return inverse


DELTA_RULE = Operator(
    name="KvcDeltaRule",
    summary="A linear layer (Gated DeltaNet) takes the tokens of a prompt or a turn into its state, and is read.",
    inputs=(*of_tokens("B", "M"), Tensor("lengths", INT64, ("B",), "tokens of each row"), *WEIGHTS, *STATE),
    outputs=read_of_tokens("B", "M"),
    write=_write,
)
