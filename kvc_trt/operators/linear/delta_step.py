"""KvcDeltaStep: a linear layer takes in one token and is read: the definition of `kvc_trt/reference/linear.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

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
from kvc_trt.operators.schema import Operator
from kvc_trt.operators.shapes import Layout, float32, size

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    seen = emit.Concat(LAST_INPUTS.name, emit.Unsqueeze("mixed", [1]), axis=1)
    kernel = int(layout.number(KERNEL))
    mixed = convolved(emit, float32(emit, seen), channel_weights(emit), 1, kernel)
    query, key, value = vectors(emit, mixed)
    query, key = (_for_value_heads(emit, part) for part in (query, key))
    stays, written = (emit.Unsqueeze(part, [2, 3]) for part in (emit.Exp(log_decays(emit)), written_parts(emit)))
    # All of the memory is read here: an executor may write the result over it.
    decayed = emit.Mul(MEMORY.name, stays)
    correction = emit.Mul(emit.Sub(value, emit.MatMul(key, decayed)), written)
    memory = emit.Add(decayed, emit.Mul(emit.Transpose(key, perm=[0, 1, 3, 2]), correction))
    read = emit.Mul(emit.MatMul(query, memory), read_scale(emit))
    return {
        "output": emit.CastLike(emit.Squeeze(read, [2]), "mixed"),
        "last_inputs_out": emit.Slice(seen, [1], [kernel], [1]),
        "memory_out": memory,
    }


def _for_value_heads(emit: Emitter, rows: Value) -> Value:
    """Repeat the vectors [B,key heads,1,KeySize] of key heads for the value heads that share them."""
    heads = size(emit, MEMORY.name, 1)
    shared = emit.Div(heads, size(emit, rows, 1))
    repeated = emit.Expand(emit.Unsqueeze(rows, [2]), emit.Concat([1, 1], shared, [1, 1], axis=0))
    return str(emit.Reshape(repeated, emit.Concat([0], heads, [1, -1], axis=0)))


DELTA_STEP = Operator(
    name="KvcDeltaStep",
    summary="A linear layer (Gated DeltaNet) takes one token of each row into its state, and is read.",
    inputs=(*of_tokens("B"), *WEIGHTS, *STATE),
    outputs=read_of_tokens("B"),
    write=_write,
)
