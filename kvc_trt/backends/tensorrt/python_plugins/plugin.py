"""The plugin methods that TensorRT calls, the same for all operators; differences are in their schemas.

A plugin keeps no state but its attributes and the size of the cache's elements, which shapes of outputs depend on and
TensorRT tells with the types alone. A call uses only the tensor descriptions that TensorRT passes, so clones, contexts
and profiles cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvc_trt.backends.tensorrt.python_plugins.calls import Call, Kernels, output_shapes
from kvc_trt.backends.tensorrt.python_plugins.report import report, reporting
from kvc_trt.kernels.structs import Dtype
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.dimensions import Dimensions, Refusal
from kvc_trt.operators.schema import CACHE, FLOAT16, VERSION, Element, Operator, Tensor

if TYPE_CHECKING:
    import tensorrt

CACHE_TYPES: Mapping[str, Dtype] = {"FLOAT": Dtype.FLOAT32, "HALF": Dtype.FLOAT16, "BF16": Dtype.BFLOAT16}
"""TensorRT types that a cache can have."""

NAMES: Mapping[Element, str] = {FLOAT16: "HALF"}
"""TensorRT's names of element types, where they differ from ours."""

IMPOSSIBLE_WORKSPACE = 2**62
"""Returned instead of an error, which the workspace query cannot report: more than any GPU has, so that no engine is
built whose workspace would be too small."""

NOT_ALIASED = -1


class PluginMethods:
    """A plugin without its base classes, which belong to TensorRT's module (`registration.py`)."""

    def __init__(
        self, trt: ModuleType, operator: Operator, fields: Mapping[str, int], kernels: Callable[[], Kernels]
    ) -> None:
        self._trt, self._operator, self._fields, self._kernels = trt, operator, dict(fields), kernels
        self._element_bytes: int | None = None
        self.plugin_name, self.plugin_version, self.plugin_namespace = operator.name, VERSION, KVC_DOMAIN
        self.num_outputs = len(operator.outputs)
        # A collection points into its fields, and TensorRT reads it after the call returns: keep both.
        self._serialised_fields = [
            trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32)
            for name, value in self._fields.items()
        ]
        self._serialised = trt.PluginFieldCollection(self._serialised_fields)

    def get_capability_interface(self, kind: tensorrt.PluginCapabilityType) -> PluginMethods:
        """Return the plugin itself, which has all three capabilities."""
        return self

    def clone(self) -> PluginMethods:
        """Return a plugin with the same attributes and the same type of the cache."""
        made = type(self)(self._trt, self._operator, self._fields, self._kernels)
        made._element_bytes = self._element_bytes
        return made

    def attach_to_context(self, context: Any) -> PluginMethods:
        """Return a plugin for one execution context."""
        return self.clone()

    def get_fields_to_serialize(self) -> tensorrt.PluginFieldCollection:
        """Return the attributes, from which an engine recreates the plugin."""
        fields: tensorrt.PluginFieldCollection = self._serialised
        return fields

    def get_output_data_types(self, input_types: Sequence[tensorrt.DataType]) -> list[tensorrt.DataType]:
        """Return the types of the outputs; Refusal unless every input has its type."""
        with reporting(self.plugin_name):
            self._check_inputs(len(input_types))
            cache_type = self._cache_type(input_types[0])
            self._element_bytes = _dtype_of(cache_type).bytes
            for tensor, found in zip(self._operator.inputs, input_types, strict=True):
                expected = self._type_of(tensor, cache_type)
                if found != expected:
                    raise Refusal(f"{tensor.name}: expected DataType {int(expected)}, found {int(found)}")
            return [self._type_of(tensor, cache_type) for tensor in self._operator.outputs]

    def get_output_shapes(
        self,
        inputs: Sequence[tensorrt.DimsExprs],
        shape_inputs: Sequence[tensorrt.DimsExprs],
        builder: tensorrt.IExprBuilder,
    ) -> list[tensorrt.DimsExprs]:
        """Return the shapes of the outputs as expressions of the inputs' shapes."""
        with reporting(self.plugin_name):
            self._check_inputs(len(inputs))
            if len(shape_inputs) != 0:
                raise Refusal(f"expected no shape inputs, found {len(shape_inputs)}")
            operations = self._trt.DimensionOperation
            shapes = output_shapes(self._operator, self._fields, inputs, builder, operations, self._element_bytes)
            return [self._dims(shape) for shape in shapes]

    def supports_format_combination(
        self, position: int, tensors: Sequence[tensorrt.DynamicPluginTensorDesc], inputs: int
    ) -> bool:
        """Accept linear tensors of the schema's types; the first tensor determines the cache's type."""
        specs = (*self._operator.inputs, *self._operator.outputs)
        if inputs != len(self._operator.inputs) or len(tensors) != len(specs) or not 0 <= position < len(specs):
            return False
        cache_type, desc = self._cache_type(tensors[0].desc.type), tensors[position].desc
        linear = desc.format == self._trt.TensorFormat.LINEAR
        return linear and cache_type.name in CACHE_TYPES and desc.type == self._type_of(specs[position], cache_type)

    def get_aliased_input(self, output: int) -> int:
        """Return the input whose buffer an output shares."""
        alias = self._operator.outputs[output].alias if 0 <= output < len(self._operator.outputs) else None
        return NOT_ALIASED if alias is None else [tensor.name for tensor in self._operator.inputs].index(alias)

    def configure_plugin(
        self, inputs: Sequence[tensorrt.DynamicPluginTensorDesc], outputs: Sequence[tensorrt.DynamicPluginTensorDesc]
    ) -> None:
        """Raise Refusal unless the kernels support both ends of the profile."""
        with reporting(self.plugin_name):
            self._check_counts(len(inputs), len(outputs))
            for end in ("min", "max"):
                self._call_at(inputs, end).workspace_bytes(self._kernels())

    def get_workspace_size(
        self, inputs: Sequence[tensorrt.DynamicPluginTensorDesc], outputs: Sequence[tensorrt.DynamicPluginTensorDesc]
    ) -> int:
        """Return the scratch memory at the largest sizes of the profile; TensorRT asks before the optimum is known."""
        try:
            self._check_counts(len(inputs), len(outputs))
            return self._call_at(inputs, "max").workspace_bytes(self._kernels())
        except Exception as error:
            report(self.plugin_name, error)
            return IMPOSSIBLE_WORKSPACE

    def get_valid_tactics(self) -> list[int]:
        """Return no tactics besides the default one."""
        return []

    def set_tactic(self, tactic: int) -> None:
        """Ignore the tactic: there is only one."""

    def on_shape_change(
        self, inputs: Sequence[tensorrt.PluginTensorDesc], outputs: Sequence[tensorrt.PluginTensorDesc]
    ) -> None:
        """Raise Refusal unless the kernels support these shapes."""
        with reporting(self.plugin_name):
            self._check_counts(len(inputs), len(outputs))
            self._call_with(inputs, outputs).workspace_bytes(self._kernels())

    def enqueue(
        self,
        input_desc: Sequence[tensorrt.PluginTensorDesc],
        output_desc: Sequence[tensorrt.PluginTensorDesc],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Queue the kernels on `stream`. Raises Refusal if a cache was copied, or with the C ABI's reason."""
        with reporting(self.plugin_name):
            self._check_counts(len(input_desc), len(output_desc))
            call = self._call_with(input_desc, output_desc)
            self._check_aliases(inputs, outputs)
            call.launch(self._kernels(), inputs, outputs, workspace, stream)

    def _check_inputs(self, inputs: int) -> None:
        self._check_counts(inputs, len(self._operator.outputs))

    def _check_counts(self, inputs: int, outputs: int) -> None:
        expected = len(self._operator.inputs), len(self._operator.outputs)
        if (inputs, outputs) != expected:
            raise Refusal(f"expected {expected[0]} inputs and {expected[1]} outputs, found {inputs} and {outputs}")

    def _call_at(self, inputs: Sequence[tensorrt.DynamicPluginTensorDesc], end: str) -> Call:
        """Return the call at one end ("min" or "max") of an optimisation profile."""
        cache_type = self._cache_type(inputs[0].desc.type)
        call = self._empty_call(cache_type)
        for tensor, found in zip(self._operator.inputs, inputs, strict=True):
            self._check_type(tensor, found.desc, cache_type)
            call.sizes.bind(tensor.name, tensor.shape, getattr(found, end))
        self._operator.derive(self._fields, call.sizes)
        return call

    def _call_with(
        self, inputs: Sequence[tensorrt.PluginTensorDesc], outputs: Sequence[tensorrt.PluginTensorDesc]
    ) -> Call:
        """Return the call for concrete shapes of inputs and outputs."""
        cache_type = self._cache_type(inputs[0].type)
        call = self._empty_call(cache_type)
        for tensor, found in zip(self._operator.inputs, inputs, strict=True):
            self._check_type(tensor, found, cache_type)
            call.sizes.bind(tensor.name, tensor.shape, found.dims)
        self._operator.derive(self._fields, call.sizes)
        for tensor, found in zip(self._operator.outputs, outputs, strict=True):
            self._check_type(tensor, found, cache_type)
            call.sizes.bind(tensor.name, tensor.shape, found.dims)
        return call

    def _empty_call(self, cache_type: tensorrt.DataType) -> Call:
        dtype = _dtype_of(cache_type)
        return Call(self._operator, self._fields, Dimensions(dtype.bytes), dtype)

    def _check_type(self, tensor: Tensor, found: tensorrt.PluginTensorDesc, cache_type: tensorrt.DataType) -> None:
        expected = self._type_of(tensor, cache_type)
        if found.type != expected or found.format != self._trt.TensorFormat.LINEAR:
            raise Refusal(
                f"{tensor.name}: expected DataType {int(expected)} in linear format, "
                f"found DataType {int(found.type)} in format {int(found.format)}"
            )

    def _check_aliases(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        addresses = dict(zip((tensor.name for tensor in self._operator.inputs), inputs, strict=True))
        for tensor, address in zip(self._operator.outputs, outputs, strict=True):
            if tensor.alias is not None and address != addresses[tensor.alias]:
                raise Refusal(
                    f"{tensor.name}: expected the buffer of {tensor.alias} "
                    "(engines are built with kALIASED_PLUGIN_IO_10_03), found another one"
                )

    def _dims(self, shape: Sequence[tensorrt.IDimensionExpr]) -> tensorrt.DimsExprs:
        dims: tensorrt.DimsExprs = self._trt.DimsExprs(len(shape))
        for axis, expr in enumerate(shape):
            dims[axis] = expr
        return dims

    def _cache_type(self, first: tensorrt.DataType) -> tensorrt.DataType:
        """Return the type of the cache, given that of the first input.

        Bounds in fp8 and codes do not tell it, and an operator of them alone does not look at it.
        """
        is_told = self._operator.element_of(self._operator.inputs[0], self._fields) == CACHE
        return first if is_told else self._trt.DataType.FLOAT

    def _type_of(self, tensor: Tensor, cache_type: tensorrt.DataType) -> tensorrt.DataType:
        element = self._operator.element_of(tensor, self._fields)
        return cache_type if element == CACHE else getattr(self._trt.DataType, NAMES.get(element, element))


def _dtype_of(cache_type: tensorrt.DataType) -> Dtype:
    if cache_type.name not in CACHE_TYPES:
        raise Refusal(f"type of the cache: expected float32, float16 or bfloat16, found DataType {int(cache_type)}")
    return CACHE_TYPES[cache_type.name]
