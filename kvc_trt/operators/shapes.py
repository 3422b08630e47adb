"""Small expressions that several bodies share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from kvc_trt.operators.emitter import Emitter, Value

MASKED = np.float32(-3.4e38)
"""Score of an entry that must not take part: finite, so that a row without entries gives no NaN."""


@dataclass(frozen=True)
class HeadShape:
    """Attention shape of one engine. Bodies of decode operators contain it as numbers.

    An executor cannot derive it in advance while the batch is free: ONNX Runtime folds a Shape node only when every
    dimension of its input is known, and a decode step would run a dozen of them per layer. Only an engine whose caches
    differ in their heads leaves `heads` and `kv_heads` out (None), and its bodies ask their inputs.
    """

    heads: int | None
    kv_heads: int | None
    head_size: int

    def grouped(self, emit: Emitter, cache: Value) -> Value | list[int]:
        """[B,G,g,D] as Reshape takes it, for a query [B,H,D] over `cache` [B,G,C,D]."""
        if self.heads is None or self.kv_heads is None:
            return str(emit.Concat([0], size(emit, cache, 1), [-1, self.head_size], axis=0))
        return [0, self.kv_heads, self.heads // self.kv_heads, self.head_size]

    def flat(self, emit: Emitter, query: Value) -> Value | list[int]:
        """[B,H,D] as Reshape takes it, for a result of `query`'s shape."""
        return str(emit.Shape(query)) if self.heads is None else [0, self.heads, self.head_size]

    @property
    def fixed_kv_heads(self) -> int:
        """`kv_heads` of operators that need the number; ValueError where an engine leaves it out."""
        if self.kv_heads is None:
            raise ValueError("kv_heads is None; expected a number: this operator's caches cannot differ in their heads")
        return self.kv_heads

    @property
    def fixed_heads(self) -> int:
        """`heads` likewise."""
        if self.heads is None:
            raise ValueError("heads is None; expected a number: this operator's caches cannot differ in their heads")
        return self.heads


def size(emit: Emitter, value: Value, axis: int) -> Value:
    """Length of one axis as INT64 [1]."""
    return str(emit.Shape(value, start=axis, end=axis + 1))


def scalar(emit: Emitter, value: Value) -> Value:
    """INT64 [1] as a scalar."""
    return str(emit.Squeeze(value, [0]))


def one(emit: Emitter, value: Value) -> Value:
    """A scalar as a tensor [1]."""
    return str(emit.Unsqueeze(value, [0]))


def float32(emit: Emitter, value: Value) -> Value:
    """Scores and sums run in fp32 whatever the cache type."""
    return str(emit.Cast(value, to=TensorProto.FLOAT))


def int32(emit: Emitter, value: Value) -> Value:
    """Cast to INT32, the type of every index list that leaves an operator."""
    return str(emit.Cast(value, to=TensorProto.INT32))


def count_to(emit: Emitter, length: Value) -> Value:
    """INT64 [n]: 0, 1, ..., n-1 for `length` [1]."""
    return str(emit.Range(0, scalar(emit, length), 1))


def attention_scale(emit: Emitter, query: Value, axis: int) -> Value:
    """1/sqrt(head size), FLOAT [1]."""
    return str(emit.Reciprocal(emit.Sqrt(float32(emit, size(emit, query, axis)))))
