"""Looking inside a graph: internal values as outputs of an in-memory copy."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import ModelProto, TensorProto, helper

_INDEX_LISTS = ("indices.", "selected.")


def index_lists(model: ModelProto) -> list[str]:
    """Names of the index lists that the compression operators of a graph return."""
    return [name for node in model.graph.node for name in node.output if name.startswith(_INDEX_LISTS)]


def expose(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """A copy of `model` that also returns the INT32 lists `indices.L` / `selected.L`; the model stays as it is."""
    copy = ModelProto()
    copy.CopyFrom(model)
    known = set(index_lists(model))
    for name in names:
        if name not in known:
            raise ValueError(f"{name}: not an index list of this graph; it has {', '.join(sorted(known)) or 'none'}")
        copy.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT32, ["batch", None, None]))
    return copy
