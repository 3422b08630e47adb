"""The parts of a prefill graph as ONNX Runtime sessions: one session for all layers whose parts are equal.

Weights are inputs of the parts and are bound where the weight file is mapped, so neither a layer nor a part has a copy
of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from kvc_trt.backends.onnxruntime.binding import bind_input, bind_output, shrinking
from kvc_trt.backends.onnxruntime.loading import LoadOptions, load_graph, run_bound
from kvc_trt.graph.prefill_parts import LENGTHS, TOKENS, Part, PrefillParts

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, OrtValue

    from kvc_trt.backends.onnxruntime.shared_weights import SharedWeights

Value = Union["OrtValue", NDArray[Any]]

ELEMENT_TYPES = {
    "tensor(float)": TensorProto.FLOAT,
    "tensor(float16)": TensorProto.FLOAT16,
    "tensor(int64)": TensorProto.INT64,
    "tensor(int32)": TensorProto.INT32,
    "tensor(int8)": TensorProto.INT8,
    "tensor(bool)": TensorProto.BOOL,
}
"""ONNX's element types by the names that ONNX Runtime has for them."""


class LoadedPart:
    """One part of one layer: the session of all parts like it, and this layer's weights."""

    def __init__(self, part: Part, session: InferenceSession, weights: Iterable[OrtValue]) -> None:
        self.part, self.session = part, session
        self._weights = tuple(weights)

    def run(
        self, inputs: Mapping[str, Value], outputs: Mapping[str, NDArray[Any]] | None = None, *, shrink: bool = True
    ) -> list[OrtValue]:
        """Run it, write the `outputs` that are given, and return all outputs in order; arrays are contiguous.

        With `shrink`, the session frees its buffers at the end.
        """
        binding, outputs = self.session.io_binding(), outputs or {}
        for place, name in enumerate(self.part.inputs):
            if isinstance(value := inputs[name], np.ndarray):
                bind_input(binding, f"in.{place}", value)
            else:
                binding.bind_ortvalue_input(f"in.{place}", value)
        for place, weight in enumerate(self._weights, len(self.part.inputs)):
            binding.bind_ortvalue_input(f"in.{place}", weight)
        for place, name in enumerate(self.part.outputs):
            if name in outputs:
                bind_output(binding, f"out.{place}", outputs[name])
            else:
                binding.bind_output(f"out.{place}", "cpu")
        run_bound(self.session, binding, shrinking() if shrink else None)
        return list(binding.get_outputs())


class PartLoader:
    """Loads the parts of one graph in their order: the types of a part's inputs are those of earlier ones' outputs."""

    def __init__(self, parts: PrefillParts, weights: SharedWeights, options: LoadOptions) -> None:
        self._parts, self._weights, self._options = parts, weights, options
        self._types = {TOKENS: int(TensorProto.INT64), LENGTHS: int(TensorProto.INT64)}
        self._sessions: dict[bytes, InferenceSession] = {}

    def load(self, part: Part) -> LoadedPart:
        """Return a part with the session of an equal one, if there is one."""
        model = self._parts.model(part, self._types)
        key = model.SerializeToString(deterministic=True)
        if key not in self._sessions:
            self._sessions[key] = load_graph(lambda: model, self._options)
        session = self._sessions[key]
        for name, output in zip(part.outputs, session.get_outputs(), strict=True):
            self._types[name] = ELEMENT_TYPES[output.type]
        return LoadedPart(part, session, (self._weight(self._parts.weights[name]) for name in part.weights))

    def _weight(self, tensor: TensorProto) -> OrtValue:
        from onnxruntime import OrtValue

        found = self._weights.value(tensor)
        return OrtValue.ortvalue_from_numpy(numpy_helper.to_array(tensor)) if found is None else found
