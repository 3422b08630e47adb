"""Drop unused outputs of a graph in memory before an executor loads it.

A graph file declares every output of every operator. ONNX Runtime inlines the bodies but does not remove dead nodes:
the sorted list of selected tokens alone would cost a tenth of a sparse step. The file on disk is not changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from kvc_trt.operators import KVC_DOMAIN


def prune(model: ModelProto, *, except_for: Collection[str] = ()) -> ModelProto:
    """Return a copy of `model` whose functions return only outputs that some call uses; results are bit-identical.

    Functions named in `except_for` stay as they are.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    wanted = {output.name for output in copy.graph.output} | read_names(copy.graph.node)
    for body in copy.functions:
        if body.name in except_for:
            continue
        calls = [node for node in copy.graph.node if (node.domain, node.op_type) == (KVC_DOMAIN, body.name)]
        _drop_outputs(body, calls, wanted)
    return copy


def _drop_outputs(body: FunctionProto, calls: list[NodeProto], wanted: set[str]) -> None:
    kept = [i for i in range(len(body.output)) if any(call.output[i] in wanted for call in calls)]
    body.output[:] = [body.output[i] for i in kept]
    for call in calls:
        call.output[:] = [call.output[i] for i in kept]
    _drop_dead(body.node, set(body.output))


def _drop_dead(nodes: list[NodeProto], wanted: set[str]) -> None:
    """Remove nodes without wanted outputs, from the last to the first, and unwanted outputs of If nodes."""
    for index in reversed(range(len(nodes))):
        node = nodes[index]
        if not wanted.intersection(node.output):
            del nodes[index]
            continue
        if node.op_type == "If":
            _drop_branch_outputs(node, wanted)
        wanted |= read_names([node])


def _drop_branch_outputs(node: NodeProto, wanted: set[str]) -> None:
    kept = [i for i, name in enumerate(node.output) if name in wanted]
    node.output[:] = [node.output[i] for i in kept]
    for branch in _graphs(node):
        outputs = [branch.output[i] for i in kept]
        del branch.output[:]
        branch.output.extend(outputs)
        _drop_dead(branch.node, {output.name for output in outputs})


def read_names(nodes: Iterable[NodeProto]) -> set[str]:
    """Return every value that the nodes and their subgraphs read."""
    names: set[str] = set()
    for node in nodes:
        names.update(node.input)
        for graph in _graphs(node):
            names |= read_names(graph.node) | {output.name for output in graph.output}
    return names


def _graphs(node: NodeProto) -> list[GraphProto]:
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]
