"""Turn a prefill graph into a model of OpenVINO that reads its weights where they are mapped.

OpenVINO knows no model-local functions. Attention, products with quantised matrices and rows of quantised tables get a
form of its own; all other operators are computed by ONNX Runtime inside the graph.
"""

from __future__ import annotations

import io
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.openvino.foreign import ForeignOperator
from kvc_trt.backends.openvino.paged_attention import AttentionHeads, paged_attention
from kvc_trt.backends.openvino.quantised import CONTRIBUTED, OURS, quantised_product, quantised_rows
from kvc_trt.backends.run_options import PrefillPrecision
from kvc_trt.backends.single_operator import SingleOperator, single_operators
from kvc_trt.methods.base.registry import operators
from kvc_trt.operators import CONTRIB_DOMAIN, KVC_DOMAIN
from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.quantised_linear import QUANTISED_LINEAR, QUANTISED_ROWS
from kvc_trt.operators.schema import OF_SOME_CALLS
from kvc_trt.operators.tensors import SINCE_BEFORE

if TYPE_CHECKING:
    import openvino
    from onnx import GraphProto, ModelProto

    from kvc_trt.files.held import HeldFile

Array = NDArray[Any]
Identity: TypeAlias = tuple[str, tuple[tuple[str, int], ...]]
"""An operator's name, and its attributes."""
Conversion: TypeAlias = "Callable[[Any], list[openvino.Output]]"


@dataclass(frozen=True)
class GraphConstants:
    """Constants of a graph by name. OpenVINO does not copy them: they must live as long as a model that uses them."""

    arrays: Mapping[str, Array]
    mapping: mmap.mmap | None = None
    """The file that holds them, if any does."""

    @classmethod
    def mapped(cls, graph: GraphProto, weights: HeldFile) -> GraphConstants:
        """Map the initializers that a graph keeps in the weight file."""
        from onnx import helper

        # OpenVINO shares arrays only if they could be written; such pages would be copies, the file stays as it is.
        mapping = weights.map(private_writes=True)
        arrays = {}
        for tensor in graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place:
                dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
                start, count = int(place["offset"]), int(place["length"]) // dtype.itemsize
                arrays[tensor.name] = np.frombuffer(mapping, dtype, count, start).reshape(tensor.dims)
        return cls(arrays, mapping)

    def release_pages(self) -> None:
        """Return the pages of the file to the system; they are read again if they are still needed."""
        if self.mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Target:
    """The settings that a lowered graph depends on besides the graph."""

    heads: AttentionHeads
    dtype: str
    """Type of the caches."""
    precision: PrefillPrecision = "f32"
    threads: int | None = None
    """The number of threads; None for all cores."""

    @property
    def lowered(self) -> frozenset[str]:
        """Names of the operators that OpenVINO computes; ONNX Runtime computes the others."""
        return frozenset((PREFILL_ATTENTION.name, QUANTISED_LINEAR.name, QUANTISED_ROWS.name))

    @property
    def inlined(self) -> frozenset[str]:
        """Names of the operators whose bodies OpenVINO runs."""
        return frozenset(() if self.heads.supported else (PREFILL_ATTENTION.name,))


def lower(model: ModelProto, constants: GraphConstants, target: Target) -> openvino.Model:
    """Return OpenVINO's form of a prefill graph, or of one operator. `model` stays as it is.

    The named `constants` replace initializers or inputs. States come first among the outputs: OpenVINO runs a graph
    from its first output to its last, so each layer is compacted before the next one runs, and its caches are freed.
    """
    import openvino
    from onnx import inliner
    from openvino.frontend.onnx import ConversionExtension

    core = openvino.Core()
    core.add_extension(
        ConversionExtension(
            "MatMulNBits", CONTRIB_DOMAIN, lambda node: [quantised_product(node, constants.arrays, CONTRIBUTED)]
        )
    )
    for name, convert in _conversions(model, constants, target).items():
        core.add_extension(ConversionExtension(name, KVC_DOMAIN, convert))
    graph = inliner.inline_selected_functions(model, [(KVC_DOMAIN, name) for name in target.inlined])
    del graph.functions[:]
    _turn_into_inputs(graph.graph, constants.arrays)
    _put_states_first(graph.graph)
    lowered = core.read_model(io.BytesIO(graph.SerializeToString()))
    _replace_by_constants(lowered, constants.arrays)
    return lowered


def _conversions(model: ModelProto, constants: GraphConstants, target: Target) -> dict[str, Conversion]:
    """Return for each operator the function that turns a node into its outputs in OpenVINO's graph."""
    found: dict[str, Conversion] = {}
    if PREFILL_ATTENTION.name not in target.inlined:
        found[PREFILL_ATTENTION.name] = lambda node: [
            paged_attention(node.get_input(0), node.get_input(1), node.get_input(2), target.heads, target.precision)
        ]
    found[QUANTISED_LINEAR.name] = lambda node: [quantised_product(node, constants.arrays, OURS)]
    found[QUANTISED_ROWS.name] = lambda node: [quantised_rows(node)]
    foreign = [one for one in single_operators(model, target.dtype) if one.name not in target.lowered]
    loaded = {_identity(one): ForeignOperator(one, target.threads, target.dtype) for one in foreign}
    return {**found, **{one.name: _calling(one.name, loaded) for one in foreign}}


def _calling(name: str, loaded: Mapping[Identity, ForeignOperator]) -> Conversion:
    schema = operators()[name]

    def convert(node: Any) -> list[openvino.Output]:
        own = schema.for_numbers({one.name: node.get_attribute(one.name, 0) for one in OF_SOME_CALLS})
        names = [one.name for one in own.attributes]
        attributes = {name: node.get_attribute(name, SINCE_BEFORE.get(name)) for name in names}
        called = loaded[name, tuple(sorted(attributes.items()))]
        return called.place([node.get_input(place) for place in range(len(own.inputs))])

    return convert


def _identity(operator: SingleOperator) -> Identity:
    return operator.name, tuple(sorted(operator.attributes.items()))


def _turn_into_inputs(graph: GraphProto, arrays: Mapping[str, Array]) -> None:
    """Declare each constant as an input. OpenVINO would read it from a file beside the graph only, and copy it."""
    from onnx import helper

    known = {value.name: value for value in graph.input}
    kept = [tensor for tensor in graph.initializer if tensor.name not in arrays]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(kept)
    graph.input.extend(value for name, value in known.items() if name not in arrays)
    graph.input.extend(
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in arrays.items()
    )


def _put_states_first(graph: GraphProto) -> None:
    last = ("cache_lengths", "logits")
    outputs = sorted(graph.output, key=lambda value: last.index(value.name) + 1 if value.name in last else 0)
    del graph.output[:]
    graph.output.extend(outputs)


def _replace_by_constants(model: openvino.Model, arrays: Mapping[str, Array]) -> None:
    from openvino import opset13 as op

    for parameter in model.get_parameters():
        name = parameter.get_friendly_name()
        if name in arrays:
            constant = op.constant(arrays[name], shared_memory=True)
            for target in parameter.output(0).get_target_inputs():
                target.replace_source_output(constant.output(0))
            model.remove_parameter(parameter)
