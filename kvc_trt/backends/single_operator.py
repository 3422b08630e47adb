"""Cut an engine's kvc operators out of its graph and make each runnable alone.

Node attributes and function bodies come from the graph file, not from the builder: what is tested is what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from kvc_trt.backends.onnxruntime.loading import NO_ERRORS, end_waiting_with_the_run
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.base.registry import operators
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.schema import FLOAT, FLOAT16, INT8, INT32, INT64, UINT8, Element, Operator
from kvc_trt.operators.tensors import SINCE_BEFORE

Array = NDArray[Any]

_FIXED: Mapping[Element, int] = {
    FLOAT: TensorProto.FLOAT,
    FLOAT16: TensorProto.FLOAT16,
    INT64: TensorProto.INT64,
    INT32: TensorProto.INT32,
    INT8: TensorProto.INT8,
    UINT8: TensorProto.UINT8,
}
_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


@dataclass(frozen=True)
class SingleOperator:
    """One operator with the attributes that `nodes` nodes of a graph share."""

    name: str
    attributes: Mapping[str, int]
    nodes: int
    inputs: tuple[str, ...]
    model: ModelProto
    cache: int | None = None
    """The number of one cache that the operator serves."""

    def run(self, **inputs: Array) -> list[Array]:
        """Return the outputs in the operator's order."""
        results: list[Array] = self._session.run(None, {name: inputs[name] for name in self.inputs})
        return results

    @cached_property
    def _session(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = NO_ERRORS
        end_waiting_with_the_run(options)
        return onnxruntime.InferenceSession(self.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def single_operators(model: ModelProto, dtype: str, sites: Sequence[CacheSite] = ()) -> list[SingleOperator]:
    """Return every distinct kvc operator of a graph (`alike_nodes`); `dtype` is its activation type."""
    return [
        _single_operator(model, nodes, _TYPES[dtype], cache) for nodes, cache in alike_nodes(model.graph.node, sites)
    ]


def alike_nodes(nodes: Iterable[NodeProto], sites: Sequence[CacheSite]) -> list[tuple[list[NodeProto], int | None]]:
    """Return the calls of our operators that have the same constants, with the number of a cache that they serve.

    Nodes differ by their attributes and, if the engine's `sites` are given, by the shape of their cache.
    """
    by_name = {site.name: site for site in sites}
    alike: dict[tuple[Any, ...], list[NodeProto]] = {}
    serves: dict[tuple[Any, ...], int | None] = {}
    for node in nodes:
        if node.domain == KVC_DOMAIN:
            site = _site(node, by_name)
            shape = None if site is None else (site.kv_heads and len(site.kv_heads), site.parameters)
            key = (node.op_type, shape, *sorted(_attributes(node).items()))
            alike.setdefault(key, []).append(node)
            serves.setdefault(key, None if site is None else site.cache)
    return [(found, serves[key]) for key, found in alike.items()]


def _site(node: NodeProto, by_name: Mapping[str, CacheSite]) -> CacheSite | None:
    """Return the cache that a node writes, identified by the suffix of an output's name."""
    names = (output.partition(".")[2] for output in node.output)
    return next((by_name[name] for name in names if name in by_name), None)


def _single_operator(model: ModelProto, nodes: list[NodeProto], float_type: int, cache: int | None) -> SingleOperator:
    function = next(f for f in model.functions if (f.domain, f.name) == (KVC_DOMAIN, nodes[0].op_type))
    inputs = tuple(function.input)
    node = NodeProto()
    node.CopyFrom(nodes[0])
    del node.input[:], node.output[:]
    node.input.extend(inputs)
    node.output.extend(f"result.{i}" for i in range(len(function.output)))

    types = _types(node, float_type)
    graph_inputs = [helper.make_tensor_value_info(name, types[name], None) for name in inputs]
    outputs = [
        helper.make_tensor_value_info(name, types[declared], None)
        for name, declared in zip(node.output, function.output, strict=True)
    ]
    graph = helper.make_graph([node], node.op_type, graph_inputs, outputs)
    single = helper.make_model(
        graph, functions=list(model.functions), opset_imports=model.opset_import, ir_version=model.ir_version
    )
    return SingleOperator(node.op_type, _attributes(node), len(nodes), inputs, single, cache)


def _types(node: NodeProto, float_type: int) -> dict[str, int]:
    """Return the types of a node's inputs and outputs, by their names in the operator."""
    operator, attributes = _operator(node), _attributes(node)
    return {one.name: _FIXED.get(operator.element_of(one, attributes), float_type) for one in operator.tensors}


def _attributes(node: NodeProto) -> dict[str, int]:
    own = {one.name for one in _operator(node).attributes}
    known = {name: value for name, value in SINCE_BEFORE.items() if name in own}
    return known | {a.name: a.i for a in node.attribute if a.type == onnx.AttributeProto.INT}


def _operator(node: NodeProto) -> Operator:
    """Return the operator of a node in the form that its attributes name."""
    return operators()[node.op_type].for_numbers({one.name: one.i for one in node.attribute})
