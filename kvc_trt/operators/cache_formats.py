"""Bodies that store vectors in a cache format, and that read them back: the bits of `reference/stored.py`.

A vector are D channels along the last axis. Its parts are codes INT8 (packed where they have 4 bits), a scale or the
byte of an exponent for each group, and a minimum for each group where the format has them.

ONNX has no operator that reads the bits of a number. Exponents are estimated by a logarithm, which may miss them by one
beside a power of two. Those of `fp8` scales are then corrected by comparing with a table; those of codes need not be,
because the codes of neighbouring exponents continue each other (see `fp8_bounds.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.models.cache_formats import FP8, GROUP, INT8, VectorFormat
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators.shapes import float32

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

LARGEST_HALF = np.float32(65504)
LARGEST_E4M3 = np.float32(448)
_BIAS = 127
_LARGEST_OF_BYTE = np.minimum(np.ldexp(448.0, np.arange(255) - _BIAS), np.finfo(np.float32).max).astype(np.float32)
"""The largest number of which each byte of an exponent makes at most 448."""
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - _BIAS), np.nan).astype(np.float32)
_INVERSES = np.ldexp(np.float32(1), _BIAS - np.arange(255)).astype(np.float32)
_E4M3 = np.nan_to_num(np.arange(256, dtype=np.uint8).view(numpy_dtype("float8_e4m3fn")).astype(np.float32))
_INVERSE_LN_2 = np.float32(1 / np.log(2))


def write_stored(emit: Emitter, vectors: Value, form: VectorFormat) -> tuple[Value, ...]:
    """Return the parts of FLOAT `vectors` [...,D]; one with a NaN or an Inf is stored as a vector of NaN."""
    lost = emit.IsNaN(emit.ReduceSum(emit.Mul(vectors, np.float32(0)), [-1]))
    # -0 is read as 0; ONNX Runtime drops an addition of 0.
    finite = emit.Where(emit.Or(lost, emit.Equal(vectors, np.float32(0))), np.float32(0), vectors)
    if form == INT8:
        return _int8(emit, finite, lost)
    return _fp8(emit, finite, lost) if form == FP8 else _int4(emit, finite, lost)


def write_read(emit: Emitter, parts: tuple[Value, ...], form: VectorFormat) -> Value:
    """Return the FLOAT vectors [...,D] of their parts."""
    if not form.grouped:
        return write_values(emit, parts[0], parts[1:], form)
    codes = emit.Reshape(_nibbles(emit, parts[0]), emit.Concat(emit.Shape(parts[1]), [-1], axis=0))
    read = write_values(emit, codes, [emit.Unsqueeze(part, [-1]) for part in parts[1:]], form)
    return str(emit.Reshape(read, emit.Concat(emit.Shape(parts[1], end=-1), [-1], axis=0)))


def write_values(emit: Emitter, codes: Value, numbers: Sequence[Value], form: VectorFormat) -> Value:
    """Return FLOAT values of codes that are not packed; `numbers`, scales and minima, broadcast to them."""
    if form == FP8:
        code = emit.Gather(_E4M3, emit.cast(codes, np.int32))
        return str(emit.Mul(code, emit.Gather(_POWERS, emit.cast(numbers[0], np.int32))))
    read = emit.Mul(float32(emit, codes), float32(emit, numbers[0]))
    return str(emit.Add(read, float32(emit, numbers[1])) if form.grouped else read)


def write_codes(emit: Emitter, packed: Value, form: VectorFormat) -> Value:
    """Return the codes INT8 [...,D], one for each channel."""
    if form.code_bits == 8:
        return packed
    shape = emit.Concat(emit.Shape(packed, end=-1), [-1], axis=0)
    return emit.cast(emit.Reshape(_nibbles(emit, packed), shape), np.int8)


def _nibbles(emit: Emitter, packed: Value) -> Value:
    """Return the two numbers of each byte, the low nibble first, FLOAT [...,D/2,2]."""
    byte = float32(emit, packed)
    byte = emit.Where(emit.Less(byte, np.float32(0)), emit.Add(byte, np.float32(256)), byte)
    high = emit.Floor(emit.Mul(byte, np.float32(1 / 16)))
    low = emit.Sub(byte, emit.Mul(high, np.float32(16)))
    return str(emit.Concat(emit.Unsqueeze(low, [-1]), emit.Unsqueeze(high, [-1]), axis=-1))


def _int8(emit: Emitter, vectors: Value, lost: Value) -> tuple[Value, ...]:
    scale = _scale(emit, emit.Div(emit.ReduceMax(emit.Abs(vectors), [-1]), np.float32(127)))
    code = emit.Clip(emit.Round(emit.Div(vectors, scale)), np.float32(-127), np.float32(127))
    return emit.cast(code, np.int8), _half(emit, scale, lost)


def _scale(emit: Emitter, exact: Value) -> Value:
    """Return a scale as it is stored, FLOAT: rounded to FLOAT16, 1 where it would be 0."""
    rounded = _rounded(emit, emit.Min(exact, LARGEST_HALF))
    return str(emit.Where(emit.Equal(rounded, np.float32(0)), np.float32(1), rounded))


def _rounded(emit: Emitter, number: Value) -> Value:
    """Round FLOAT to FLOAT16, as FLOAT: around operators on FLOAT16, ONNX Runtime removes casts, and their rounding."""
    return float32(emit, emit.cast(number, np.float16))


def _half(emit: Emitter, rounded: Value, lost: Value) -> Value:
    """Return numbers of vectors as they are stored, FLOAT16: NaN for those that are lost."""
    return emit.cast(emit.Where(lost, np.float32(np.nan), rounded), np.float16)


def _fp8(emit: Emitter, vectors: Value, lost: Value) -> tuple[Value, ...]:
    largest = emit.ReduceMax(emit.Abs(vectors), [-1])
    estimate = emit.Sub(emit.Floor(emit.Mul(emit.Log(largest), _INVERSE_LN_2)), np.float32(8 - _BIAS))
    near = emit.cast(emit.Clip(estimate, np.float32(1), np.float32(253)), np.int32)
    below = emit.Gather(_LARGEST_OF_BYTE, emit.Sub(near, np.int32(1)))
    here = emit.Gather(_LARGEST_OF_BYTE, near)
    byte = emit.Where(emit.Greater(largest, here), emit.Add(near, np.int32(1)), near)
    byte = emit.Where(emit.LessOrEqual(largest, below), emit.Sub(near, np.int32(1)), byte)
    byte = emit.Where(emit.Equal(largest, np.float32(0)), np.int32(_BIAS), byte)
    scaled = emit.Mul(vectors, emit.Gather(_INVERSES, byte))
    number = emit.Clip(scaled, -LARGEST_E4M3, LARGEST_E4M3)
    exponent = emit.Floor(emit.Mul(emit.Log(emit.Abs(number)), _INVERSE_LN_2))
    place = emit.Add(emit.Max(exponent, np.float32(-6)), np.float32(6))
    quanta = np.ldexp(np.float32(1), np.arange(16) - 9)
    steps = emit.Round(emit.Abs(emit.Div(number, emit.Gather(quanta, emit.cast(place, np.int32)))))
    magnitude = emit.Add(emit.Mul(place, np.float32(8)), steps)
    negative = emit.Less(emit.Reciprocal(number), np.float32(0))
    code = emit.Where(negative, emit.Sub(magnitude, np.float32(128)), magnitude)
    code = emit.Where(lost, np.float32(0), code)
    signed = emit.Where(emit.Greater(byte, np.int32(127)), emit.Sub(byte, np.int32(256)), byte)
    return emit.cast(code, np.int8), emit.cast(emit.Where(lost, np.int32(-1), signed), np.int8)


def _int4(emit: Emitter, vectors: Value, lost: Value) -> tuple[Value, ...]:
    size = emit.Shape(vectors, start=-1)
    whole = emit.Equal(emit.Mod(size, GROUP), 0)
    shape = emit.Concat(emit.Shape(vectors, end=-1), [-1], emit.Where(whole, GROUP, size), axis=0)
    grouped = emit.Reshape(vectors, shape)
    least, most = emit.ReduceMin(grouped, [-1]), emit.ReduceMax(grouped, [-1])
    rounded = _rounded(emit, emit.Clip(least, -LARGEST_HALF, LARGEST_HALF))
    minimum = emit.Where(emit.Equal(rounded, np.float32(0)), np.float32(0), rounded)  # no -0
    scale = _scale(emit, emit.Div(emit.Sub(most, least), np.float32(15)))
    steps = emit.Round(emit.Div(emit.Sub(grouped, minimum), scale))
    level = emit.Clip(steps, np.float32(0), np.float32(15))
    pairs = emit.Reshape(level, emit.Concat(emit.Shape(vectors, end=-1), [-1, 2], axis=0))
    low, high = emit.Split(pairs, axis=-1, num_outputs=2, outputs=2)
    byte = emit.Squeeze(emit.Add(low, emit.Mul(high, np.float32(16))), [-1])
    code = emit.Where(emit.Greater(byte, np.float32(127)), emit.Sub(byte, np.float32(256)), byte)
    code = emit.Where(lost, np.float32(0), code)
    numbers = (_half(emit, emit.Squeeze(part, [-1]), lost) for part in (scale, minimum))
    return emit.cast(code, np.int8), *numbers
