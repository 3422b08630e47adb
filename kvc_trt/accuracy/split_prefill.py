"""A prefill graph in two: what every policy has in common, and what one policy keeps of it.

Prefill attention is dense and exact under every policy, so the logits and each layer's queries, keys and values do not
depend on it. The trunk is what the logits need; the head is the rest: compaction, bounds, room for the answer. Both are
cut out of the engine's own graph, node by node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from kvc_trt.operators import KVC_DOMAIN

_LOGITS = "logits"
_ELEMENT_TYPES = {
    "tensor(float)": TensorProto.FLOAT,
    "tensor(float16)": TensorProto.FLOAT16,
    "tensor(int64)": TensorProto.INT64,
    "tensor(int32)": TensorProto.INT32,
    "tensor(bool)": TensorProto.BOOL,
}


@dataclass(frozen=True)
class SplitPrefill:
    """The two halves; `identity` is equal for graphs that have the same trunk, whatever their heads read of it."""

    between: tuple[str, ...]
    """Values of the trunk that the head reads."""
    identity: str
    _first: ModelProto
    _second: ModelProto

    def trunk(self, values: Iterable[str]) -> ModelProto:
        """input_ids, prompt_lengths -> logits and `values`."""
        trunk = ModelProto()
        trunk.CopyFrom(self._first)
        trunk.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in values)
        return trunk

    def head(self, types: Mapping[str, str]) -> ModelProto:
        """input_ids, prompt_lengths and `between` -> the state; `types` as ONNX Runtime says them: tensor(float)."""
        head = ModelProto()
        head.CopyFrom(self._second)
        head.graph.input.extend(
            helper.make_tensor_value_info(name, _ELEMENT_TYPES[types[name]], None) for name in self.between
        )
        return head


def split_prefill(model: ModelProto) -> SplitPrefill:
    """Cut a prefill graph; the model stays as it is. Values of the trunk get names that count from its start.

    ValueError for a graph whose nodes hold graphs of their own (function bodies may).
    """
    if any(attribute.HasField("g") for node in model.graph.node for attribute in node.attribute):
        raise ValueError("a node of the prefill graph holds a graph of its own: its inputs do not say what it reads")
    trunk, rest = _parts(model.graph)
    names = {old: f"trunk.{i}" for i, old in enumerate(o for node in trunk for o in node.output if o != _LOGITS)}
    trunk, rest = [_renamed(node, names) for node in trunk], [_renamed(node, names) for node in rest]
    produced = set(names.values()) - {name for node in rest for name in node.output}
    between = tuple(dict.fromkeys(name for node in rest for name in node.input if name in produced))
    logits = [output for output in model.graph.output if output.name == _LOGITS]
    state = [output for output in model.graph.output if output.name != _LOGITS]
    first, second = _model(model, trunk, logits), _model(model, rest, state)
    identity = hashlib.sha256(first.SerializeToString(deterministic=True)).hexdigest()
    return SplitPrefill(between, identity, first, second)


def _parts(graph: GraphProto) -> tuple[list[NodeProto], list[NodeProto]]:
    """Nodes that the logits need, and the others, each in the graph's order. Constants stand where they are read."""
    producer = {name: i for i, node in enumerate(graph.node) for name in node.output}
    needed = _ancestors(graph, producer, [_LOGITS])
    rest = {i for i in range(len(graph.node)) if i not in needed}
    read = {producer[name] for i in rest for name in graph.node[i].input if name in producer}
    constants = {i for i in read & needed if graph.node[i].op_type == "Constant"}
    return [graph.node[i] for i in sorted(needed)], [graph.node[i] for i in sorted(rest | constants)]


def _ancestors(graph: GraphProto, producer: Mapping[str, int], names: list[str]) -> set[int]:
    found: set[int] = set()
    pending = list(names)
    while pending:
        index = producer.get(pending.pop())
        if index is not None and index not in found:
            found.add(index)
            pending += graph.node[index].input
    return found


def _renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.ClearField("name")  # it counts over the whole graph
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    return copy


def _model(whole: ModelProto, nodes: list[NodeProto], outputs: list[ValueInfoProto]) -> ModelProto:
    """A model of some nodes with the whole model's inputs, and the initializers and function bodies they use."""
    read = {name for node in nodes for name in node.input}
    called = {node.op_type for node in nodes if node.domain == KVC_DOMAIN}
    weights = [tensor for tensor in whole.graph.initializer if tensor.name in read]
    return helper.make_model(
        helper.make_graph(nodes, whole.graph.name, list(whole.graph.input), outputs, weights),
        functions=[body for body in whole.functions if body.name in called],
        opset_imports=whole.opset_import,
        ir_version=whole.ir_version,
    )
