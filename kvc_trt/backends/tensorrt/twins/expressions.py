"""Shapes while a network is built: sizes that may still be open, as TensorRT's expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvc_trt.backends.tensorrt.twins.report import Refusal
from kvc_trt.backends.tensorrt.twins.sizes import NAMES, Sizes, check_rank
from kvc_trt.backends.tensorrt.twins.tables import Operator, Tensor

if TYPE_CHECKING:
    import tensorrt


def output_shapes(
    operator: Operator,
    fields: Mapping[str, int],
    inputs: Sequence[tensorrt.DimsExprs],
    builder: tensorrt.IExprBuilder,
    product: tensorrt.DimensionOperation,
) -> list[list[tensorrt.IDimensionExpr]]:
    """Shape of every output from those of the inputs. Raises Refusal where these contradict one another."""
    exprs: dict[str, tensorrt.IDimensionExpr] = {}
    sizes = Sizes()
    for tensor, dims in zip(operator.inputs, inputs, strict=True):
        _bind(tensor, dims, exprs, sizes)
    operator.derive(fields, sizes)
    return [_shape_of(tensor, exprs, sizes, builder, product) for tensor in operator.outputs]


def _bind(tensor: Tensor, dims: tensorrt.DimsExprs, exprs: dict[str, tensorrt.IDimensionExpr], sizes: Sizes) -> None:
    """Take the expressions that `dims` gives to the symbols; those that are constant go to `sizes` too."""
    check_rank(tensor.name, tensor.shape, len(dims))
    for axis, symbol in enumerate(tensor.shape):
        expr = exprs[symbol] = dims[axis]
        if expr.is_constant():
            sizes.fix(symbol, expr.get_constant_value(), tensor.name)


def _shape_of(
    tensor: Tensor,
    exprs: Mapping[str, tensorrt.IDimensionExpr],
    sizes: Sizes,
    builder: tensorrt.IExprBuilder,
    product: tensorrt.DimensionOperation,
) -> list[tensorrt.IDimensionExpr]:
    shape = []
    for symbol in tensor.shape:
        if symbol in exprs:
            shape.append(exprs[symbol])
        elif symbol in sizes:
            shape.append(builder.constant(sizes[symbol]))
        elif symbol == "2D" and "D" in exprs:
            shape.append(builder.operation(product, exprs["D"], builder.constant(2)))
        else:
            raise Refusal(f"{tensor.name}: its {NAMES[symbol]} is not known")
    return shape
