"""Linear layers on quantised matrices as a product with a compressed matrix, whose inputs OpenVINO rounds to 8 bits."""

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
