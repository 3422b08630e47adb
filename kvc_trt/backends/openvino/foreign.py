"""Operators that ONNX Runtime computes inside OpenVINO's graph: those that choose the kept tokens of a prompt.

OpenVINO's TopK does not define the order of equal values, and the lowest index has to win. So these operators run as in
every other prefill: as native operators if ONNX Runtime has them, otherwise as their bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import openvino
from numpy.typing import NDArray

from kvc_trt.backends.onnxruntime.loading import LoadOptions, load_graph
from kvc_trt.backends.single_operator import SingleOperator
from kvc_trt.methods.base.registry import operators
from kvc_trt.operators.schema import CACHE, FLOAT, FLOAT16, INT8, INT32, INT64, UINT8, Element, Operator

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


class ForeignOperator:
    """One operator with its attributes, loaded by ONNX Runtime."""

    def __init__(self, single: SingleOperator, threads: int | None, dtype: str) -> None:
        self.schema: Operator = operators()[single.name].for_numbers(single.attributes)
        self.attributes = single.attributes
        self.elements: list[Element] = [self.schema.element_of(one, self.attributes) for one in self.schema.outputs]
        self.dtype = dtype
        options = LoadOptions(threads, prepack=False, dtype=dtype)
        self._session: InferenceSession = load_graph(lambda: single.model, options)
        self._inputs = [(value.name, _NUMPY[value.type]) for value in self._session.get_inputs()]

    def run(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs in the operator's order."""
        given = zip(self._inputs, arrays, strict=True)
        feeds = {name: np.ascontiguousarray(array, dtype) for (name, dtype), array in given}
        return cast(list[NDArray[Any]], self._session.run(None, feeds))

    def place(self, inputs: Sequence[openvino.Output]) -> list[openvino.Output]:
        """Return the outputs of a new node of OpenVINO's graph, in the operator's types."""
        from openvino import opset13

        types: dict[str, str] = {**_TYPES, CACHE: _OPENVINO[self.dtype]}
        outputs = ForeignNode(self, inputs).outputs()
        return [
            opset13.convert(output, types[element]).output(0)
            for output, element in zip(outputs, self.elements, strict=True)
        ]


class ForeignNode(openvino.Op):  # type: ignore[misc]
    """The node of OpenVINO's graph that calls a `ForeignOperator`."""

    def __init__(self, operator: ForeignOperator, inputs: Sequence[Any]) -> None:
        super().__init__(self)
        self._operator = operator
        self.set_arguments(list(inputs))
        self.constructor_validate_and_infer_types()

    def validate_and_infer_types(self) -> None:
        """Declare the outputs; their shapes follow from the inputs' if these are known.

        The CPU plugin computes in float32 and int32, and changes the types of all nodes but those from outside.
        """
        shapes = [self.get_input_partial_shape(place) for place in range(self.get_input_size())]
        if all(shape.is_static for shape in shapes):
            found = self._shapes([list(shape.to_shape()) for shape in shapes])
        else:
            found = [[-1] * len(output.shape) for output in self._operator.schema.outputs]
        self.set_output_size(len(found))
        for place, (element, shape) in enumerate(zip(self._operator.elements, found, strict=True)):
            computed = openvino.Type.i32 if element in (INT8, INT32, INT64) else openvino.Type.f32
            self.set_output_type(place, computed, openvino.PartialShape(shape))

    def clone_with_new_inputs(self, new_inputs: Sequence[Any]) -> ForeignNode:
        """Return a node of the same operator."""
        return ForeignNode(self._operator, new_inputs)

    def has_evaluate(self) -> bool:
        """Return True: the node computes itself."""
        return True

    def evaluate(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Compute the outputs."""
        found = self._operator.run([tensor.data for tensor in inputs])
        for tensor, array in zip(outputs, found, strict=True):
            tensor.shape = array.shape
            tensor.data[...] = array
        return True

    def _shapes(self, inputs: list[list[int]]) -> list[list[int]]:
        schema = self._operator.schema
        named = dict(zip((one.name for one in schema.inputs), inputs, strict=True))
        element_bytes = np.dtype(self._operator.dtype).itemsize
        found = schema.output_shapes(named, self._operator.attributes, element_bytes)
        return [found[one.name] for one in schema.outputs]


_OPENVINO = {"float32": "f32", "float16": "f16"}
_TYPES: dict[str, str] = {FLOAT: "f32", FLOAT16: "f16", INT64: "i64", INT32: "i32", INT8: "i8", UINT8: "u8"}
_NUMPY = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}
