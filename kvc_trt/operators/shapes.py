"""Small expressions shared by several bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS, CacheFormat
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators.dimensions import page_multiple
from kvc_trt.operators.softmax import PLAIN, SoftmaxForm

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

LOWEST: Mapping[str, float] = {
    "float32": -3.4028234663852886e38,
    "float16": -65504.0,
    "bfloat16": -3.3895313892515355e38,
}
"""Lowest finite value of each cache type. Finite on purpose: zero times infinity would be NaN."""

MASKED = np.float32(-3.4e38)
"""Score of an entry that is excluded; finite, so that a row without entries gives no NaN."""


@dataclass(frozen=True)
class HeadShape:
    """The attention shape of one engine, which bodies of decode operators contain as numbers.

    ONNX Runtime folds a Shape node only if every dimension of its input is known. The batch is not, so a decode step
    would run a dozen Shape nodes per layer. Only an engine whose caches differ in their heads leaves out `heads` and
    `kv_heads` (None); its bodies read the shapes of their inputs.
    """

    heads: int | None
    kv_heads: int | None
    head_size: int

    def grouped(self, emit: Emitter, cache: Value) -> Value | list[int]:
        """Return the target [B,G,g,D] of a Reshape of a query [B,H,D] over `cache` [B,G,C,D]."""
        if self.heads is None or self.kv_heads is None:
            return str(emit.Concat([0], size(emit, cache, 1), [-1, self.head_size], axis=0))
        return [0, self.kv_heads, self.heads // self.kv_heads, self.head_size]

    def flat(self, emit: Emitter, query: Value) -> Value | list[int]:
        """Return the target [B,H,D] of a Reshape to the shape of `query`."""
        return str(emit.Shape(query)) if self.heads is None else [0, self.heads, self.head_size]

    @property
    def fixed_kv_heads(self) -> int:
        """`kv_heads`, for operators that need the number; ValueError if the engine leaves it out."""
        if self.kv_heads is None:
            raise ValueError("kv_heads is None; expected a number: this operator's caches cannot differ in their heads")
        return self.kv_heads

    @property
    def fixed_heads(self) -> int:
        """`heads`, for operators that need the number; ValueError if the engine leaves it out."""
        if self.heads is None:
            raise ValueError("heads is None; expected a number: this operator's caches cannot differ in their heads")
        return self.heads


@dataclass(frozen=True)
class Layout:
    """The numbers of one engine that bodies contain. All others are attributes of the call."""

    shape: HeadShape
    capacity: int | None = None
    """Slots of every cache; None if layers differ and bodies read the shapes of their inputs."""
    pages: int | None = None
    """P of every cache; None if layers differ."""
    dtype: str = "float32"
    """Type of the cache."""
    fp8_bounds: bool = False
    """True if page bounds are fp8 codes."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers that cannot be attributes, by name ("pool_kernel"): ONNX wants a list, or the body depends on them."""
    cache_format: CacheFormat = CACHE_FORMATS[AUTO]
    """The format in which caches store keys and values."""
    by_length: bool = False
    """True if rows of a compaction have numbers of their own."""
    softmax: SoftmaxForm = PLAIN
    """The softmax that attention applies to its logits."""

    @property
    def lowest(self) -> np.ndarray:
        """The value that marks an empty page: the lowest finite number of the cache's type."""
        return np.array(LOWEST[self.dtype], numpy_dtype(self.dtype))

    @property
    def page_multiple(self) -> int:
        """The divisor of the number of pages of every cache."""
        return page_multiple(1 if self.fp8_bounds else numpy_dtype(self.dtype).itemsize)

    def number(self, name: str) -> float:
        """Return one of `numbers` by name; ValueError if the engine does not have it."""
        if name not in self.numbers:
            raise ValueError(f"the layout has no {name}; expected it among its numbers ({', '.join(self.numbers)})")
        return self.numbers[name]


def size(emit: Emitter, value: Value, axis: int) -> Value:
    """Return the length of one axis as INT64 [1]."""
    return str(emit.Shape(value, start=axis, end=axis + 1))


def scalar(emit: Emitter, value: Value) -> Value:
    """Turn INT64 [1] into a scalar."""
    return str(emit.Squeeze(value, [0]))


def one(emit: Emitter, value: Value) -> Value:
    """Turn a scalar into a tensor [1]."""
    return str(emit.Unsqueeze(value, [0]))


def float32(emit: Emitter, value: Value) -> Value:
    """Cast to FLOAT, the type of scores and sums for every cache type."""
    return emit.cast(value, np.float32)


def bounds_of_read(emit: Emitter, values: Value, layout: Layout) -> Value:
    """Return FLOAT numbers of keys that were read from a format in the type of bounds, without -0.

    Codes are often 0, and executors differ in the sign of the maximum of 0 and -0."""
    unsigned = emit.Where(emit.Equal(values, np.float32(0)), np.float32(0), values)
    return emit.cast(unsigned, layout.lowest.dtype)


def int32(emit: Emitter, value: Value) -> Value:
    """Cast to INT32, the type of every index list that leaves an operator."""
    return emit.cast(value, np.int32)


def count_to(emit: Emitter, length: Value) -> Value:
    """Return 0, 1, ..., n-1 as INT64 [n] for `length` [1]."""
    return str(emit.Range(0, scalar(emit, length), 1))


def attention_scale(emit: Emitter, query: Value, axis: int) -> Value:
    """Return 1/sqrt(head size) as FLOAT [1]."""
    return str(emit.Reciprocal(emit.Sqrt(float32(emit, size(emit, query, axis)))))


def into_slots(emit: Emitter, rows: Value, stored: Value) -> Value:
    """Put `rows` [B,G,n,D] into a cache of `capacity` slots, with zeros where nothing is `stored`."""
    zero = emit.CastLike(0.0, rows)
    return pad_end(emit, emit.Where(stored, rows, zero), emit.attribute("capacity"), zero)


def pad_end(emit: Emitter, rows: Value, length: Value, fill: Value | np.generic) -> Value:
    """Lengthen axis 2 of `rows` to `length` (scalar)."""
    missing = emit.Sub(one(emit, length), size(emit, rows, 2))
    return str(emit.Pad(rows, emit.Concat([0], missing, axis=0), fill, [2]))
