"""A prefill graph in two: the trunk, which is equal under every policy, and the head, which is the policy's own.

Prefill attention is dense and exact under every policy, so the logits and each layer's queries, keys and values do not
depend on it. The trunk is the part that computes the logits; the head is the rest: compaction, bounds, room for the
answer. Both are cut out of the engine's own graph, node by node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from kvc_trt.backends.onnxruntime.prefill.loaded_parts import ELEMENT_TYPES
from kvc_trt.graph.prefill_parts import LOGITS, check_flat, submodel


@dataclass(frozen=True)
class SplitPrefill:
    """The two halves; `identity` is equal for graphs that have the same trunk, whatever their heads read of it."""

    between: tuple[str, ...]
    """The values of the trunk that the head reads."""
    identity: str
    _first: ModelProto
    _second: ModelProto

    def trunk(self, values: Iterable[str]) -> ModelProto:
        """Return the graph of the trunk: input_ids, prompt_lengths -> logits and `values`."""
        trunk = ModelProto()
        trunk.CopyFrom(self._first)
        trunk.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in values)
        return trunk

    def head(self, types: Mapping[str, str]) -> ModelProto:
        """Return the graph of the head: input_ids, prompt_lengths and `between` -> the state.

        `types` has ONNX Runtime's names of the types of `between`, such as tensor(float).
        """
        head = ModelProto()
        head.CopyFrom(self._second)
        head.graph.input.extend(
            helper.make_tensor_value_info(name, ELEMENT_TYPES[types[name]], None) for name in self.between
        )
        return head


def split_prefill(model: ModelProto) -> SplitPrefill:
    """Cut a prefill graph without changing the model. Values of the trunk are renamed by their number from its start.

    ValueError for a graph whose nodes hold graphs of their own (function bodies may).
    """
    check_flat(model)
    trunk, rest = _parts(model.graph)
    names = {old: f"trunk.{i}" for i, old in enumerate(o for node in trunk for o in node.output if o != LOGITS)}
    trunk, rest = [_renamed(node, names) for node in trunk], [_renamed(node, names) for node in rest]
    produced = set(names.values()) - {name for node in rest for name in node.output}
    between = tuple(dict.fromkeys(name for node in rest for name in node.input if name in produced))
    logits = [output for output in model.graph.output if output.name == LOGITS]
    state = [output for output in model.graph.output if output.name != LOGITS]
    first, second = _model(model, trunk, logits), _model(model, rest, state)
    identity = hashlib.sha256(first.SerializeToString(deterministic=True)).hexdigest()
    return SplitPrefill(between, identity, first, second)


def _parts(graph: GraphProto) -> tuple[list[NodeProto], list[NodeProto]]:
    """Nodes that the logits need, and the others in the graph's order. A constant goes where it is read.

    The first stand in the order in which the logits need them, which no node of the others has a part in: policies
    share constants with the trunk at places of their own, and would have other trunks in the graph's order.
    """
    producer = {name: i for i, node in enumerate(graph.node) for name in node.output}
    needed = _as_needed(graph, producer, LOGITS)
    rest = set(range(len(graph.node))) - set(needed)
    read = {producer[name] for i in rest for name in graph.node[i].input if name in producer}
    constants = {i for i in read.intersection(needed) if graph.node[i].op_type == "Constant"}
    return [graph.node[i] for i in needed], [graph.node[i] for i in sorted(rest | constants)]


def _as_needed(graph: GraphProto, producer: Mapping[str, int], name: str) -> list[int]:
    """Return the nodes that a value needs, each after those whose values it reads."""
    found: dict[int, None] = {}
    pending = [producer[name]]
    while pending:
        index = pending[-1]
        before = [producer[read] for read in graph.node[index].input if read in producer]
        missing = [one for one in before if one not in found]
        if missing:
            pending.append(missing[0])
        else:
            found[pending.pop()] = None
    return list(found)


def _renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.ClearField("name")  # it counts over the whole graph
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    return copy


def _model(whole: ModelProto, nodes: list[NodeProto], outputs: list[ValueInfoProto]) -> ModelProto:
    """Return a model of some nodes, with the whole model's inputs and the initializers that the nodes read."""
    read = {name for node in nodes for name in node.input}
    weights = [tensor for tensor in whole.graph.initializer if tensor.name in read]
    return submodel(whole, nodes, whole.graph.input, outputs, weights)
