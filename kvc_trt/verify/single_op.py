"""An engine's own kvc operators, each cut out of its graph and made runnable alone.

Node attributes and function bodies come from the artefact itself, not from the builder: what is tested is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from kvc_trt.graph import KVC_DOMAIN

Array = NDArray[Any]

_LENGTHS = ("prompt_lengths", "cache_lengths")
_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


@dataclass(frozen=True)
class SingleOp:
    """One operator with the attributes that `nodes` nodes of a graph share."""

    name: str
    attributes: Mapping[str, int]
    nodes: int
    inputs: tuple[str, ...]
    model: ModelProto

    def run(self, **inputs: Array) -> list[Array]:
        """Outputs in the order in which the operator declares them."""
        results: list[Array] = self._session.run(None, {name: inputs[name] for name in self.inputs})
        return results

    @cached_property
    def _session(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        return onnxruntime.InferenceSession(self.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def single_ops(graph: Path, dtype: str) -> list[SingleOp]:
    """Every distinct kvc operator of a graph file; `dtype` is the engine's cache and activation type."""
    model = onnx.load(str(graph), load_external_data=False)
    alike: dict[tuple[Any, ...], list[NodeProto]] = {}
    for node in model.graph.node:
        if node.domain == KVC_DOMAIN:
            alike.setdefault((node.op_type, *sorted(_attributes(node).items())), []).append(node)
    return [_single_op(model, nodes, _TYPES[dtype]) for nodes in alike.values()]


def _single_op(model: ModelProto, nodes: list[NodeProto], float_type: int) -> SingleOp:
    function = next(f for f in model.functions if (f.domain, f.name) == (KVC_DOMAIN, nodes[0].op_type))
    inputs = tuple(function.input)
    node = NodeProto()
    node.CopyFrom(nodes[0])
    del node.input[:], node.output[:]
    node.input.extend(inputs)
    node.output.extend(f"result.{i}" for i in range(len(function.output)))

    graph_inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64 if name in _LENGTHS else float_type, None)
        for name in inputs
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = helper.make_graph([node], node.op_type, graph_inputs, outputs)
    single = helper.make_model(
        graph, functions=list(model.functions), opset_imports=model.opset_import, ir_version=model.ir_version
    )
    return SingleOp(node.op_type, _attributes(node), len(nodes), inputs, single)


def _attributes(node: NodeProto) -> dict[str, int]:
    return {a.name: a.i for a in node.attribute if a.type == onnx.AttributeProto.INT}
