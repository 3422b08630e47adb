"""Operators on matrices in 4 or 8 bits: a linear layer, and rows of a table; one stored matrix serves both.

A matrix [out,in] is `packed` UINT8 [out,in/block,block*bits/8], the layout of ONNX Runtime's MatMulNBits (element 2j is
the low nibble of byte j), and `scales` [out,in/block]: element i of a block is `(q_i - 2^(bits-1)) * scale`.

The linear layer's body multiplies in int8: the input is rounded to 8 bits, with one scale per block and row
(accuracy level 4), which is 5 times (int4) to 100 times (int8) as fast on a CPU as products in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators import CONTRIB_DOMAIN
from kvc_trt.operators.dimensions import INT32_MAX
from kvc_trt.operators.schema import FLOAT, FLOAT16, INT64, UINT8, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import Layout, float32

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

CONTRIBUTED_PRODUCT = "MatMulNBits"
"""ONNX Runtime's own operator, which the body calls, and which graphs of older engines call themselves."""
ROUNDED_INPUT = 4
"""Its accuracy level that rounds its input to 8 bits."""

PACKED = Tensor("packed", UINT8, ("Out", "Blocks", "Bytes"))
SCALES = Tensor("scales", FLOAT16, ("Out", "Blocks"))
IN_FEATURES = Attribute("in_features", 1, INT32_MAX)
OUT_FEATURES = Attribute("out_features", 1, INT32_MAX)
BITS = Attribute("bits", 4, 8, "4 or 8")
BLOCK_SIZE = Attribute("block", 16, 256, "columns that share a scale, a power of two")
WIDE_INPUT = Attribute("wide_input", 0, 1, "1: native operators round the input to 15 bits, not 8")


def _write_linear(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    product = emit.call(
        CONTRIBUTED_PRODUCT, "x", "packed", float32(emit, "scales"), domain=CONTRIB_DOMAIN,
        accuracy_level=ROUNDED_INPUT,
        K=emit.reference("in_features"), N=emit.reference("out_features"),
        bits=emit.reference("bits"), block_size=emit.reference("block"),
    )  # fmt: skip
    return {"y": float32(emit, product)}  # gives the product a type that checkers know; ONNX Runtime removes it


def _write_rows(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcQuantisedRows; only the rows asked for are unpacked."""
    packed, scales = (emit.Gather(name, "rows") for name in ("packed", "scales"))
    return {"y": unpacked(emit, packed, scales, emit.attribute("bits"))}


def unpacked(emit: Emitter, packed: Value, scales: Value, bits: Value) -> Value:
    """Write the FLOAT matrix [rows,in] of packed elements [rows,blocks,bytes] and scales [rows,blocks]."""
    one = emit.constant(np.uint8(1))
    shifts = emit.cast(emit.Range(0, 8, bits), np.uint8)
    largest = emit.BitShift(np.uint8(255), emit.cast(emit.Sub(8, bits), np.uint8), direction="RIGHT")
    zero = emit.BitShift(one, emit.cast(emit.Sub(bits, 1), np.uint8), direction="LEFT")
    stored = emit.Unsqueeze(packed, [3])
    levels = emit.BitwiseAnd(emit.BitShift(stored, shifts, direction="RIGHT"), largest)
    by_block = emit.Sub(float32(emit, emit.Reshape(levels, [0, 0, -1])), float32(emit, zero))
    by_row = emit.Unsqueeze(float32(emit, scales), [2])
    return str(emit.Reshape(emit.Mul(by_block, by_row), [0, -1]))


QUANTISED_LINEAR = Operator(
    name="KvcQuantisedLinear",
    summary="Product with a matrix in 4 or 8 bits; the input is rounded to 8 bits, or 15 where it is wide.",
    inputs=(Tensor("x", FLOAT, ("T", "In")), PACKED, SCALES),
    outputs=(Tensor("y", FLOAT, ("T", "Out")),),
    attributes=(IN_FEATURES, OUT_FEATURES, BITS, BLOCK_SIZE, WIDE_INPUT),
    formulas={"In": "in_features", "Out": "out_features"},
    write=_write_linear,
)

QUANTISED_ROWS = Operator(
    name="KvcQuantisedRows",
    summary="Rows of a matrix in 4 or 8 bits, exactly as stored: an embedding table that is also the head.",
    inputs=(Tensor("rows", INT64, ("T",)), PACKED, SCALES),
    outputs=(Tensor("y", FLOAT, ("T", "In")),),
    attributes=(BITS, BLOCK_SIZE),
    formulas={"In": "Blocks * block"},
    write=_write_rows,
)
