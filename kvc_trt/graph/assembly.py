"""Put the nodes of a graph together to a model: its inputs and outputs, its state, the operators that it calls."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from kvc_trt.errors import InputError
from kvc_trt.graph import IR_VERSION
from kvc_trt.graph.cache_nodes import layout_of
from kvc_trt.graph.layers import ELEMENT_TYPES, Layers
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weight_plans import rotary_names
from kvc_trt.graph.weights import EMBEDDING, PACKED, GraphWeights
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.registry import operators
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.rope import rotary_choice
from kvc_trt.operators import CONTRIB_DOMAIN, KVC_DOMAIN, OPSET
from kvc_trt.version import __version__


def int64(name: str, shape: Sequence[int | str]) -> ValueInfoProto:
    """Describe an INT64 input or output."""
    return helper.make_tensor_value_info(name, TensorProto.INT64, shape)


def state_values(
    config: ModelConfig, parameters: PolicyParameters, weights: GraphWeights, *, turns: bool = False, after: int = 0
) -> list[ValueInfoProto]:
    """Describe the state tensors as inputs, or as outputs `after` some tokens; with `turns`, of an extend graph."""
    return [
        helper.make_tensor_value_info(name, ELEMENT_TYPES[tensor.dtype], ["batch", *tensor.shape])
        for tensor in state_tensors(config, parameters, weights.dtype, turns=turns)
        for name in (tensor.outputs(after) if after else (tensor.name,))
    ]


def assembled(
    name: str,
    layers: Layers,
    parameters: PolicyParameters,
    inputs: list[ValueInfoProto],
    outputs: list[ValueInfoProto],
) -> ModelProto:
    """Return the model of the nodes that `layers` has written, with the bodies of the operators that they call."""
    nodes = layers.emit.nodes
    if layers.weights.bits is not None and (
        left := [node.name for node in nodes if node.op_type in ("Gemm", "MatMul")]
    ):
        raise AssertionError(f"linear layers left unquantised: {', '.join(left)}")
    layout = layout_of(layers.config, parameters, layers.weights.dtype)
    used = {node.op_type for node in nodes if node.domain == KVC_DOMAIN}
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(KVC_DOMAIN, 1)]
    if layers.weights.quantised:
        imports.append(helper.make_opsetid(CONTRIB_DOMAIN, 1))
    return helper.make_model(
        helper.make_graph(nodes, name, inputs, outputs, list(layers.initializers.values())),
        opset_imports=imports,
        ir_version=IR_VERSION,
        functions=[one.body(layout) for name, one in operators().items() if name in used],
        producer_name="kvc-trt",
        producer_version=__version__,
    )


def check(config: ModelConfig, parameters: PolicyParameters, weights: GraphWeights) -> None:
    """Raise InputError for parameters that the model or the weight file cannot serve."""
    length = parameters.max_sequence_len
    if weights.bits is not None and EMBEDDING + PACKED not in weights:
        raise InputError(
            f"{weights.location}: quantised by an older version, which new graphs cannot read",
            hint="the engine runs as it is; build it again to verify or profile it",
        )
    rows = weights.stored(rotary_names(None)[0]).shape[0]
    if rows < length:
        raise InputError(f"{weights.location}: rotary tables for {rows} positions, the engine needs {length}")
    if rotary_choice(config, rows) != rotary_choice(config, length):
        raise InputError(
            f"{weights.location}: {rotary_choice(config, rows)}, and the engine needs {length} positions",
            hint="kvc-trt build gives an engine weights of its own",
        )
