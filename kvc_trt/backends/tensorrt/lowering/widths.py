"""Write out the widths that the prefill and the extend graph leave to Reshape (-1).

After `Reshape(x, [batch, sequence, -1])` NVIDIA's parser does not know the width of a row: it refuses rotary embedding
("hiddenSize must be divisible by num_heads"), and plugins do not see the number of heads. The widths follow from the
weights, so they become numbers. A wrong number could not change a result: the Reshape would fail.

Batch and sequence stay open. ONNX's shape inference is no help: it loses the width if batch and sequence are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from kvc_trt.backends.tensorrt.lowering.operators import TensorRtInstallation
from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.turns.extend_attention import EXTEND_ATTENTION


def write_out_widths(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Replace the -1 in the shape of every Reshape whose width follows from the weights."""
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


def _written_out(node: NodeProto, known: KnownShapes) -> Shape | None:
    """Return the sizes of a Reshape with its -1 replaced; None if the width is unknown."""
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
        """Remember the parts of a list of dimensions."""
        if node.op_type == "Concat":
            self._parts[node.output[0]] = list(node.input)

    def name(self, sizes: Shape, replaced: str, nodes: list[NodeProto]) -> str:
        """Return the value that holds `sizes`; computed sizes are taken from the list that it replaces."""
        if None not in sizes:
            return self._constant(sizes, nodes)
        parts = (*self._parts[replaced][:-1], self._constant(sizes[-1:], nodes))
        if parts not in self._names:
            self._names[parts] = name = "/".join(parts)
            nodes.append(helper.make_node("Concat", parts, [name], name=name, axis=0))
        return self._names[parts]

    def _constant(self, sizes: Shape, nodes: list[NodeProto]) -> str:
        if sizes not in self._names:
            self._names[sizes] = name = f"shape.{'x'.join(map(str, sizes))}"
            numbers = [size for size in sizes if size is not None]
            value = helper.make_tensor(name, TensorProto.INT64, [len(numbers)], numbers)
            nodes.append(helper.make_node("Constant", [], [name], name=name, value=value))
        return self._names[sizes]


def _used(nodes: list[NodeProto], wanted: set[str]) -> list[NodeProto]:
    """Return `nodes` without the lists of dimensions that are no longer read."""
    kept: list[NodeProto] = []
    for node in reversed(nodes):
        if node.op_type not in ("Concat", "Constant") or wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]


MANY_TOKENS = PREFILL_ATTENTION.name, EXTEND_ATTENTION.name
_LIKE_FIRST = frozenset((
    "Cast", "DequantizeLinear", "Gelu", "Identity", "LayerNormalization", "RMSNormalization", "Relu", "RotaryEmbedding",
    "Sigmoid", *MANY_TOKENS,
))  # fmt: skip
"""Operators whose output has the shape of their first input."""

_LISTS = frozenset(("Reshape", "Unsqueeze"))
"""Operators whose second input is a list of dimensions or axes, read by its elements."""

Shape = tuple[int | None, ...]
"""Dimensions of a value, or elements of a list of dimensions; None for an unknown one."""


class KnownShapes:
    """Infers shapes by walking the nodes of a graph in order; a shape that cannot be inferred is None."""

    def __init__(self, model: ModelProto) -> None:
        self._shapes: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
        self._lists: dict[str, Shape] = {}
        for value in model.graph.input:
            dims = value.type.tensor_type.shape.dim
            self._shapes[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)

    def shape(self, name: str) -> Shape | None:
        """Return the dimensions of a value; None if not even their number is known."""
        return self._shapes.get(name)

    def elements(self, name: str) -> Shape | None:
        """Return the elements of a list of dimensions."""
        return self._lists.get(name)

    def follow(self, node: NodeProto) -> None:
        """Infer the shape of the first output of `node`, the next one in graph order."""
        if (elements := self._elements_of(node)) is not None:
            self._lists[node.output[0]] = elements
        if (shape := self._shape_of(node)) is not None:
            self._shapes[node.output[0]] = shape

    def _shape_of(self, node: NodeProto) -> Shape | None:
        if node.op_type == "Constant":
            tensor = _constant(node)
            return None if tensor is None else tuple(tensor.dims)
        if node.op_type in _LIKE_FIRST:
            return self.shape(node.input[0])
        if node.op_type == "Reshape" and self.shape(node.input[0]) is None:
            sizes = self.elements(node.input[1])
            return None if sizes is None or 0 in sizes else tuple(None if size == -1 else size for size in sizes)
        shapes = [self.shape(name) for name in node.input[: 1 if node.op_type in _LISTS else None]]
        if node.op_type not in _RULES or None in shapes:
            return None
        return _RULES[node.op_type](self, node, [shape for shape in shapes if shape is not None])

    def _elements_of(self, node: NodeProto) -> Shape | None:
        if node.op_type == "Constant":
            tensor = _constant(node)
            if tensor is None or tensor.data_type != TensorProto.INT64 or len(tensor.dims) != 1:
                return None
            return tuple(numpy_helper.to_array(tensor).tolist())
        if node.op_type == "Shape":
            shape = self.shape(node.input[0])
            return None if shape is None else shape[_attribute(node, "start", 0) : _attribute(node, "end", None)]
        if node.op_type == "Concat":
            parts = [self.elements(name) for name in node.input]
            return None if None in parts else tuple(size for part in parts if part is not None for size in part)
        return None


def reshaped(data: Shape, sizes: Shape) -> Shape:
    """Return `data` after a Reshape to `sizes`, in which 0 keeps a dimension and -1 takes the rest."""
    kept = {axis for axis, size in enumerate(sizes) if size == 0}
    left = [size for axis, size in enumerate(data) if axis not in kept]
    others = [size for size in sizes if size not in (0, -1)]
    width: int | None = None
    if len(sizes) > 1 and set(sizes[:-1]) == {None} and sizes[-1] == -1 and len(data) == 2:
        width = data[1]  # one row per token, [T,width], back to [batch,sequence,width]
    elif None not in left and None not in others:
        width = math.prod(size for size in left if size is not None) // math.prod(size or 1 for size in others)
    return tuple(data[axis] if size == 0 else width if size == -1 else size for axis, size in enumerate(sizes))


def _broadcast(known: KnownShapes, node: NodeProto, shapes: list[Shape]) -> Shape:
    axes = zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    return tuple(_wider(sizes) for sizes in axes)[::-1]


def _wider(sizes: tuple[int | None, ...]) -> int | None:
    fixed = [size for size in sizes if size not in (None, 1)]
    return fixed[0] if fixed else (None if None in sizes else 1)


def _gather(known: KnownShapes, node: NodeProto, shapes: list[Shape]) -> Shape | None:
    return shapes[1] + shapes[0][1:] if _attribute(node, "axis", 0) == 0 else None


def _gather_nd(known: KnownShapes, node: NodeProto, shapes: list[Shape]) -> Shape | None:
    data, indices = shapes
    width = indices[-1]
    return None if width is None else indices[:-1] + data[_attribute(node, "batch_dims", 0) + width :]


def _gemm(known: KnownShapes, node: NodeProto, shapes: list[Shape]) -> Shape:
    return shapes[0][0], shapes[1][0 if _attribute(node, "transB", 0) else 1]


def _transpose(known: KnownShapes, node: NodeProto, shapes: list[Shape]) -> Shape:
    order = _attribute(node, "perm", range(len(shapes[0]))[::-1])
    return tuple(shapes[0][axis] for axis in order)


def _unsqueeze(known: KnownShapes, node: NodeProto, shapes: list[Shape]) -> Shape | None:
    axes = known.elements(node.input[1])
    if axes is None or len(axes) != 1 or axes[0] is None or axes[0] < 0:
        return None
    return (*shapes[0][: axes[0]], 1, *shapes[0][axes[0] :])


def _reshape(known: KnownShapes, node: NodeProto, shapes: list[Shape]) -> Shape | None:
    sizes = known.elements(node.input[1])
    return None if sizes is None else reshaped(shapes[0], sizes)


_RULES: dict[str, Callable[[KnownShapes, NodeProto, list[Shape]], Shape | None]] = {
    **dict.fromkeys(("Add", "Max", "Min", "Mul", "Sub"), _broadcast),
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(found) for found in node.attribute if found.name == name), default)


def _constant(node: NodeProto) -> TensorProto | None:
    return next((a.t for a in node.attribute if a.name == "value" and a.type == AttributeProto.TENSOR), None)
