"""Page bounds in 8 bits: fp8 E5M2, rounded up, kept as the INT8 that has its bits.

A bound may promise more than the keys of a page hold, but never less. The stored bounds are maxima, of K and of -K, so
both are rounded up. E5M2 is the upper half of an fp16: it needs no scale, and a kernel widens it by a shift.

A number beyond the largest finite one, 57,344, is stored as that one, and so is a NaN: infinities and NaN never occur.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.dtypes import numpy_dtype

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

LARGEST = np.float32(57344)
EMPTY = np.int8(-5)
"""Code of -57,344, which marks an empty page."""
_LOWEST_EXPONENT, _EXPONENTS = -14, 30
_INVERSE_LN_2 = np.float32(1 / np.log(2))


def values_of(codes: NDArray[np.int8]) -> NDArray[np.float32]:
    """Return the float32 numbers that codes stand for."""
    values: NDArray[np.float32] = codes.view(numpy_dtype("float8_e5m2")).astype(np.float32)
    return values


def codes_of(values: NDArray[Any]) -> NDArray[np.int8]:
    """Return the codes of the smallest E5M2 numbers that are not below `values`, of any floating-point type."""
    wide = values.astype(np.result_type(values.dtype, np.float32))
    wide = np.clip(np.where(np.isnan(wide), LARGEST, wide), -LARGEST, LARGEST)
    _, exponents = np.frexp(wide)
    quanta = np.ldexp(np.float32(1), np.maximum(exponents - 1, _LOWEST_EXPONENT) - 2)
    up = np.ceil(wide / quanta) * quanta + np.float32(0)  # no -0
    codes: NDArray[np.int8] = up.astype(numpy_dtype("float8_e5m2")).view(np.int8)
    return codes


def raised(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the smallest E5M2 numbers that are not below `values`."""
    return values_of(codes_of(values)).astype(np.float64)


def write_codes(emit: Emitter, values: Value) -> Value:
    """Return `codes_of` the FLOAT `values`, INT8.

    ONNX has no operator that reads an exponent. The logarithm may miss it by one beside a power of two; the code comes
    out the same, because the codes of neighbouring exponents continue each other.
    """
    number = emit.Where(emit.IsNaN(values), LARGEST, emit.Clip(values, -LARGEST, LARGEST))
    exponent = emit.Floor(emit.Mul(emit.Log(emit.Abs(number)), _INVERSE_LN_2))
    place = emit.Sub(emit.Max(exponent, np.float32(_LOWEST_EXPONENT)), np.float32(_LOWEST_EXPONENT))
    quanta = np.ldexp(np.float32(1), np.arange(_EXPONENTS) + _LOWEST_EXPONENT - 2)
    steps = emit.Ceil(emit.Div(number, emit.Gather(quanta, emit.cast(place, np.int32))))
    magnitude = emit.Add(emit.Mul(place, np.float32(4)), emit.Abs(steps))
    code = emit.Where(emit.Less(steps, np.float32(0)), emit.Sub(magnitude, np.float32(128)), magnitude)
    return emit.cast(code, np.int8)


def write_values(emit: Emitter, codes: Value) -> Value:
    """Return `values_of` INT8 codes, FLOAT; negative ones count from the end of the table."""
    every = np.arange(256, dtype=np.uint8).view(np.int8)
    finite = np.nan_to_num(values_of(every), nan=LARGEST, posinf=LARGEST, neginf=-LARGEST)
    return str(emit.Gather(finite, emit.cast(codes, np.int32)))


def write_ranks(emit: Emitter, codes: Value) -> Value:
    """Return INT32 numbers that ascend with the values of INT8 codes; the same call turns ranks into codes again."""
    wide = emit.cast(codes, np.int32)
    return str(emit.Where(emit.Less(wide, np.int32(0)), emit.Sub(np.int32(-129), wide), wide))
