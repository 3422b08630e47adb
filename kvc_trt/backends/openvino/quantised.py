"""Quantised matrices in OpenVINO: products with a compressed matrix, and rows of a table.

OpenVINO rounds the inputs of such a product to 8 bits. Rows are computed without shifts of bytes: the operator's body,
inlined into a whole graph, gave wrong rows of 4-bit tables (2026.4.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from openvino import Output


@dataclass(frozen=True)
class Attributes:
    """The names that an operator gives to the numbers of a quantised matrix."""

    rows: str
    columns: str
    bits: str
    block: str


OURS = Attributes("out_features", "in_features", "bits", "block")
CONTRIBUTED = Attributes("N", "K", "bits", "block_size")
"""MatMulNBits, which graphs of older engines call."""


def quantised_product(node: Any, arrays: Mapping[str, NDArray[Any]], names: Attributes) -> Output:
    """Return x [T,in] times the matrix of a node, whose inputs are x, packed and scales; FLOAT [T,out].

    The CPU plugin recognises this pattern and keeps the matrix in 4 or 8 bits. Its layout is the operator's: the low
    half of a byte is the earlier element.
    """
    import openvino
    from openvino import opset13 as op

    x, packed, scales = (node.get_input(place) for place in range(3))
    matrix, factors = (arrays[value.get_node().get_friendly_name()] for value in (packed, scales))
    rows, columns = node.get_attribute(names.rows), node.get_attribute(names.columns)
    bits, block = node.get_attribute(names.bits), node.get_attribute(names.block)
    blocks = openvino.Shape([rows, columns // block, block])
    element = {4: openvino.Type.u4, 8: openvino.Type.u8}[bits]
    stored = op.constant(openvino.Tensor(matrix, blocks, element), shared_memory=True)
    middle = op.constant(np.array(1 << (bits - 1), np.uint8))
    by_block = op.constant(factors.reshape(rows, -1, 1), shared_memory=True)
    computed = by_block.get_element_type()
    levels = op.subtract(op.convert(stored, computed), op.convert(middle, computed))
    weights = op.reshape(op.multiply(levels, by_block), [rows, columns], False)
    return op.matmul(x, op.convert(weights, "f32"), False, True).output(0)


def quantised_rows(node: Any) -> Output:
    """Return the rows that a node asks for, FLOAT [T,in], exactly; its inputs are rows, packed and scales."""
    from openvino import opset13 as op

    rows, packed, scales = (node.get_input(place) for place in range(3))
    bits, block = node.get_attribute("bits"), node.get_attribute("block")
    levels = op.convert(op.gather(packed, rows, 0), "f32")
    if bits == 4:
        high = op.floor(op.multiply(levels, np.float32(1 / 16)))
        low = op.subtract(levels, op.multiply(high, np.float32(16)))
        levels = op.concat([op.unsqueeze(half, 3) for half in (low, high)], 3)
    by_block = op.reshape(op.subtract(levels, np.float32(1 << (bits - 1))), [0, 0, block], True)
    factors = op.unsqueeze(op.convert(op.gather(scales, rows, 0), "f32"), 2)
    return op.reshape(op.multiply(by_block, factors), [0, -1], True).output(0)
