"""Replace the small nodes between a layer's products by native operators, in the copy of a graph that is loaded.

A step of quantised weights takes a few milliseconds, and two hundred nodes of a few microseconds each are a part of it
that can be seen; over a prompt, each of them passes through memory once more. The operators are in no file: the nodes
that they stand for are their specification.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from kvc_trt.graph.rewrites.prune import read_names
from kvc_trt.operators import KVC_DOMAIN

ADD_NORM, GATED_UNIT, GATED_HALVES, ROTATED_HEADS = "KvcAddNorm", "KvcGatedUnit", "KvcGatedHalves", "KvcRotatedHeads"
FUSED = (ADD_NORM, GATED_UNIT, GATED_HALVES, ROTATED_HEADS)
"""The native operators that stand for several nodes."""
_PRODUCTS = ("Gemm", "KvcLinear", "KvcQuantisedLinear")
"""Operators that write activations [tokens, features]."""


def fuse(model: ModelProto, native: Collection[str]) -> None:
    """Replace the patterns that have an operator in `native`; values that are outputs of the graph stay."""
    if not set(FUSED).intersection(native):
        return
    for find in (_gated, _added_norm, _rotated_heads):
        nodes = _Nodes(model.graph)
        for last in list(model.graph.node):
            found = find(nodes, last)
            if found is not None and found.made.op_type in native:
                nodes.replace(found)
        nodes.write()


class _Match:
    """Nodes, and the one that stands for them at the place of the node `at`."""

    def __init__(self, replaced: list[NodeProto], made: NodeProto, at: NodeProto) -> None:
        self.replaced, self.made, self.at = replaced, made, at


class _Nodes:
    """The nodes of a graph by their outputs."""

    def __init__(self, graph: GraphProto) -> None:
        self._graph = graph
        self._outputs = {value.name for value in graph.output}
        self._writers = {name: node for node in graph.node for name in node.output}
        self._readers = Counter(name for node in graph.node for name in read_names([node]))
        self._constants = {one.name: one for one in graph.initializer}
        self._gone: set[int] = set()
        self._placed: dict[int, NodeProto] = {}

    def writer(self, name: str, *operators: str) -> NodeProto | None:
        """Return the node that writes a value, if it is one of these operators and nothing has replaced it."""
        node = self._writers.get(name)
        return node if node is not None and node.op_type in operators and id(node) not in self._gone else None

    def inner(self, name: str, *operators: str) -> NodeProto | None:
        """Return the writer of a value that one node alone reads, and the caller does not."""
        return self.writer(name, *operators) if self._readers[name] == 1 and name not in self._outputs else None

    def is_output(self, name: str) -> bool:
        """Return whether a value is an output of the graph, which stays."""
        return name in self._outputs

    def is_product(self, name: str) -> bool:
        """Return whether a value is activations [tokens, features] for certain."""
        return self.writer(name, *_PRODUCTS) is not None

    def shape(self, name: str) -> list[int]:
        """Return the dimensions of a constant; none for another value."""
        return list(self._constants[name].dims) if name in self._constants else []

    def numbers(self, name: str) -> list[int]:
        """Return the numbers of a constant; none for another value."""
        node = self._writers.get(name)
        if node is None or node.op_type != "Constant":
            return []
        return [int(one) for one in numpy_helper.to_array(node.attribute[0].t).ravel()]

    def readers(self, name: str) -> Iterator[NodeProto]:
        """Yield the nodes that read a value."""
        return (node for node in self._graph.node if name in node.input and id(node) not in self._gone)

    def replace(self, match: _Match) -> None:
        """Put the new node at its place when the graph is written."""
        self._gone.update(id(node) for node in match.replaced)
        self._placed[id(match.at)] = match.made

    def write(self) -> None:
        """Write the graph's nodes."""
        kept = []
        for node in self._graph.node:
            if id(node) in self._placed:
                kept.append(self._placed[id(node)])
            elif id(node) not in self._gone:
                kept.append(node)
        copies = [NodeProto.FromString(node.SerializeToString()) for node in kept]
        del self._graph.node[:]
        self._graph.node.extend(copies)


def _made(operator: str, inputs: list[str], outputs: list[str], **attributes: int | float) -> NodeProto:
    node = helper.make_node(operator, inputs, outputs, name=f"{operator}/{outputs[0]}", domain=KVC_DOMAIN)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return node


def _attributes(node: NodeProto) -> dict[str, int | float]:
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


def _gated(nodes: _Nodes, last: NodeProto) -> _Match | None:
    """gate * sigmoid(gate) * up, where both may be halves of one product."""
    if last.op_type != "Mul":
        return None
    product, up = last.input
    inner = nodes.inner(product, "Mul")
    sigmoid = None if inner is None else nodes.inner(inner.input[1], "Sigmoid")
    if inner is None or sigmoid is None or sigmoid.input[0] != inner.input[0]:
        return None
    gate, replaced = inner.input[0], [sigmoid, inner, last]
    split = nodes.writer(gate, "Split")
    if split is None:
        known = nodes.is_product(gate) and nodes.is_product(up)
        return _Match(replaced, _made(GATED_UNIT, [gate, up], list(last.output)), last) if known else None
    halves = list(split.output) == [gate, up] and _attributes(split) == {"axis": -1, "num_outputs": 2}
    readers = {id(node) for name in split.output for node in nodes.readers(name)}
    alone = readers <= {id(node) for node in replaced} and not any(map(nodes.is_output, split.output))
    if not (halves and alone and nodes.is_product(split.input[0])):
        return None
    return _Match([split, *replaced], _made(GATED_HALVES, [split.input[0]], list(last.output)), last)


def _added_norm(nodes: _Nodes, last: NodeProto) -> _Match | None:
    """The sum of the residual and a product, and its norm."""
    if last.op_type != "RMSNormalization" or _attributes(last).get("axis") != -1 or not nodes.shape(last.input[1]):
        return None
    add = nodes.writer(last.input[0], "Add")
    if add is None or not nodes.is_product(add.input[1]) or nodes.shape(add.input[0]):
        return None
    inputs, outputs = [*add.input, last.input[1]], [add.output[0], last.output[0]]
    made = _made(ADD_NORM, inputs, outputs, epsilon=_attributes(last).get("epsilon", 1e-5))
    return _Match([add, last], made, add)


def _rotated_heads(nodes: _Nodes, last: NodeProto) -> _Match | None:
    """One token's queries, keys and values out of their joint product; queries and keys are rotated."""
    if last.op_type != "Split" or _attributes(last) != {"axis": 1} or len(last.output) != 2:
        return None
    shaped = nodes.inner(last.input[0], "Reshape")
    cast = None if shaped is None else nodes.inner(shaped.input[0], "Cast")
    rotary = None if cast is None else nodes.inner(cast.input[0], "RotaryEmbedding")
    wide = None if rotary is None else nodes.inner(rotary.input[0], "Cast")
    split = None if wide is None else nodes.inner(wide.input[0], "Split")
    row = None if split is None else nodes.inner(split.input[0], "Reshape")
    if shaped is None or cast is None or rotary is None or wide is None or split is None or row is None:
        return None
    values = list(nodes.readers(split.output[-1]))
    if len(split.output) != 2 or nodes.inner(split.output[1], "Split") is None or values[0].op_type != "Reshape":
        return None
    heads, angles = nodes.numbers(last.input[1]), nodes.writer(rotary.input[1], "Gather")
    kept = nodes.numbers(values[0].input[1])
    if len(heads) != 2 or len(kept) != 3 or angles is None or not nodes.is_product(row.input[0]):
        return None
    if kept[1] != heads[1] or nodes.shape(angles.input[0])[-1:] != [kept[2] // 2]:
        return None
    if _attributes(rotary) != {"num_heads": sum(heads)}:
        return None
    outputs = [*last.output, values[0].output[0]]
    made = _made(ROTATED_HEADS, [row.input[0], *rotary.input[1:3]], outputs, heads=heads[0], kv_heads=heads[1])
    return _Match([row, split, wide, rotary, cast, shaped, last, values[0]], made, last)
