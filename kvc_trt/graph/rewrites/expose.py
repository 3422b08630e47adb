"""Expose internal values of a graph as outputs of an in-memory copy."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import ModelProto, TensorProto, helper

_INDEX_LISTS = ("indices.", "selected.")


def index_lists(model: ModelProto) -> list[str]:
    """Return the names of the index lists that a graph's compression operators produce."""
    return [name for node in model.graph.node for name in node.output if name.startswith(_INDEX_LISTS)]


def expose(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """Return a copy of `model` that also outputs the values `names`, such as the index lists `indices.L`, `selected.L`.

    ValueError for a name that no node produces.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    produced = {name for node in model.graph.node for name in node.output}
    for name in names:
        if name not in produced:
            known = ", ".join(sorted(index_lists(model))) or "none"
            raise ValueError(f"{name}: no node of this graph produces it; its index lists: {known}")
        if name.startswith(_INDEX_LISTS):
            copy.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT32, ["batch", None, None]))
        else:
            copy.graph.output.append(helper.make_empty_tensor_value_info(name))
    return copy
