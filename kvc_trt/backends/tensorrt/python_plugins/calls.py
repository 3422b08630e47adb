"""Derive from an operator's schema what TensorRT needs: shapes while a network is built, and calls of the C ABI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvc_trt.kernels.parameters import kernel_of, size_members
from kvc_trt.kernels.structs import Dtype, Parameters, struct_of
from kvc_trt.operators.dimensions import SIZES, Dimensions, Refusal, check_rank
from kvc_trt.operators.schema import Operator, Tensor

if TYPE_CHECKING:
    import tensorrt


class Kernels(Protocol):
    """The functions used of a kernel library (kvc_trt.kernels.c_library.CLibrary)."""

    def workspace_bytes(self, operation: str, params: Parameters) -> int:
        """Return the scratch memory for these sizes, in bytes."""

    def call(
        self, operation: str, params: Parameters, workspace: int | None, workspace_bytes: int, stream: int | None = None
    ) -> None:
        """Make one call of the C ABI."""


@dataclass(frozen=True)
class Call:
    """The arguments of a C ABI call except addresses."""

    operator: Operator
    attributes: Mapping[str, int]
    sizes: Dimensions
    dtype: Dtype

    def workspace_bytes(self, kernels: Kernels) -> int:
        """Return the scratch memory in bytes; KernelError with the C ABI's reason if it refuses the sizes."""
        return kernels.workspace_bytes(kernel_of(self.operator).operation, self._parameters({}))

    def launch(
        self, kernels: Kernels, inputs: Sequence[int], outputs: Sequence[int], workspace: int, stream: int
    ) -> None:
        """Queue the kernels on `stream`; addresses are in the order of the schema."""
        params = self._parameters(addresses(self.operator, inputs, outputs))
        operation = kernel_of(self.operator).operation
        kernels.call(operation, params, workspace, self.workspace_bytes(kernels), stream)

    def _parameters(self, pointers: Mapping[str, int]) -> Parameters:
        kernel = kernel_of(self.operator)
        attributes = {name: value for name, value in self.attributes.items() if name not in kernel.ignored}
        sizes = {member: self.sizes[symbol] for symbol, member in size_members(self.operator).items()}
        # TensorRT always passes contiguous tensors.
        strides = {one.name: math.prod(self.sizes[symbol] for symbol in one.contiguous) for one in kernel.strides}
        return struct_of(self.operator)(**{**attributes, **sizes, **strides, **pointers, "dtype": int(self.dtype)})


def addresses(operator: Operator, inputs: Sequence[int], outputs: Sequence[int]) -> dict[str, int]:
    """Return the struct's pointers; state that is updated in place has the input's name and the output's address."""
    named = dict(zip((tensor.name for tensor in operator.inputs), inputs, strict=True))
    for tensor, address in zip(operator.outputs, outputs, strict=True):
        named[tensor.alias or tensor.name] = address
    return named


def output_shapes(
    operator: Operator,
    attributes: Mapping[str, int],
    inputs: Sequence[tensorrt.DimsExprs],
    builder: tensorrt.IExprBuilder,
    operations: type[tensorrt.DimensionOperation],
    element_bytes: int | None,
) -> list[list[tensorrt.IDimensionExpr]]:
    """Return the shape of every output as expressions of the inputs' sizes, which may still be open.

    Raises Refusal if the inputs contradict each other, or if a size depends on `element_bytes`, that of the cache's
    elements, and it is None.
    """
    expressions: dict[str, tensorrt.IDimensionExpr] = {}
    sizes = Dimensions(element_bytes)
    for tensor, shape in zip(operator.inputs, inputs, strict=True):
        _bind(tensor, shape, expressions, sizes)
    operator.derive(attributes, sizes)
    return [_shape_of(tensor, expressions, sizes, builder, operations) for tensor in operator.outputs]


def _bind(
    tensor: Tensor,
    shape: tensorrt.DimsExprs,
    expressions: dict[str, tensorrt.IDimensionExpr],
    sizes: Dimensions,
) -> None:
    """Bind the symbols of a shape to its expressions; constant ones also go to `sizes`."""
    check_rank(tensor.name, tensor.shape, len(shape))
    for axis, symbol in enumerate(tensor.shape):
        expression = expressions[symbol] = shape[axis]
        if expression.is_constant():
            sizes.fix(symbol, expression.get_constant_value(), tensor.name)


def _shape_of(
    tensor: Tensor,
    expressions: Mapping[str, tensorrt.IDimensionExpr],
    sizes: Dimensions,
    builder: tensorrt.IExprBuilder,
    operations: type[tensorrt.DimensionOperation],
) -> list[tensorrt.IDimensionExpr]:
    shape = []
    for symbol in tensor.shape:
        if symbol in expressions:
            shape.append(expressions[symbol])
        elif symbol in sizes:
            shape.append(builder.constant(sizes[symbol]))
        elif symbol == "2D" and "D" in expressions:
            shape.append(builder.operation(operations.PROD, expressions["D"], builder.constant(2)))
        elif symbol == "C+M":
            shape.append(builder.operation(operations.SUM, expressions["C"], expressions["M"]))
        else:
            raise Refusal(f"{tensor.name}: its {SIZES[symbol].words} is not known")
    return shape
