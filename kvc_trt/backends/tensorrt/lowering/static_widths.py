"""Widths that the prefill graph leaves to be counted (-1), written out.

Behind `Reshape(x, [batch, sequence, -1])` NVIDIA's parser no longer knows how wide a row is, and then refuses rotary
embedding ("hiddenSize must be divisible by num_heads"), and plugins do not see the number of heads. The widths follow
from the weights, so they become numbers. A wrong number could not change a result: the Reshape would fail.
"""

from __future__ import annotations

from onnx import ModelProto, NodeProto, TensorProto, helper

from kvc_trt.backends.tensorrt.lowering.shapes import KnownShapes, Sizes, reshaped
from kvc_trt.backends.tensorrt.lowering.target import Target


def write_out_widths(model: ModelProto, target: Target) -> list[str]:
    """Replace the -1 in the shape of every Reshape whose width the weights fix."""
    graph, known, lists = model.graph, KnownShapes(model), _Lists()
    nodes: list[NodeProto] = []
    written = 0
    for node in graph.node:
        new: list[NodeProto] = []
        if node.op_type == "Reshape" and (sizes := _written_out(node, known)) is not None:
            node.input[1] = lists.name(sizes, node.input[1], new)
            written += 1
        lists.visit(node)
        for entry in (*new, node):
            known.follow(entry)
            nodes.append(entry)
    kept = _used(nodes, {output.name for output in graph.output})
    del graph.node[:]
    graph.node.extend(kept)
    return [f"wrote out the width of {written} Reshape nodes"] if written else []


def _written_out(node: NodeProto, known: KnownShapes) -> Sizes | None:
    """The sizes that the Reshape asks for, its -1 replaced; None where there is nothing to replace it with."""
    data, sizes = known.shape(node.input[0]), known.elements(node.input[1])
    if data is None or sizes is None or sizes.count(-1) != 1:
        return None
    width = reshaped(data, sizes)[sizes.index(-1)]
    return None if width is None else tuple(width if size == -1 else size for size in sizes)


class _Lists:
    """Lists of dimensions for Reshape, each written once."""

    def __init__(self) -> None:
        self._names: dict[tuple[object, ...], str] = {}
        self._parts: dict[str, list[str]] = {}

    def visit(self, node: NodeProto) -> None:
        """Remember what a list of dimensions was put together from."""
        if node.op_type == "Concat":
            self._parts[node.output[0]] = list(node.input)

    def name(self, sizes: Sizes, replaced: str, nodes: list[NodeProto]) -> str:
        """The value that holds `sizes`. Where some are computed, they are taken from the list that it replaces."""
        if None not in sizes:
            return self._constant(sizes, nodes)
        parts = (*self._parts[replaced][:-1], self._constant(sizes[-1:], nodes))
        if parts not in self._names:
            self._names[parts] = name = "/".join(parts)
            nodes.append(helper.make_node("Concat", parts, [name], name=name, axis=0))
        return self._names[parts]

    def _constant(self, sizes: Sizes, nodes: list[NodeProto]) -> str:
        if sizes not in self._names:
            self._names[sizes] = name = f"shape.{'x'.join(map(str, sizes))}"
            numbers = [size for size in sizes if size is not None]
            value = helper.make_tensor(name, TensorProto.INT64, [len(numbers)], numbers)
            nodes.append(helper.make_node("Constant", [], [name], name=name, value=value))
        return self._names[sizes]


def _used(nodes: list[NodeProto], wanted: set[str]) -> list[NodeProto]:
    """`nodes` without the lists of dimensions that nobody reads any more."""
    kept: list[NodeProto] = []
    for node in reversed(nodes):
        if node.op_type not in ("Concat", "Constant") or wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]
