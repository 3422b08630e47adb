"""Prepare a graph for an executor that has some of the `kvc` operators itself."""

from __future__ import annotations

from collections.abc import Collection

from onnx import ModelProto

from kvc_trt.graph.prune import prune, read_names
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.registry import OPERATORS


def prepare(model: ModelProto, native: Collection[str]) -> ModelProto:
    """Return a copy without the bodies of the operators `native`, and otherwise pruned.

    A native operator takes its outputs by place, so its calls keep them all; optional ones that nothing reads lose
    their name, and are not computed.
    """
    kept = prune(model, except_for=native)
    bodies = [body for body in kept.functions if body.name not in native]
    del kept.functions[:]
    kept.functions.extend(bodies)
    wanted = {output.name for output in kept.graph.output} | read_names(kept.graph.node)
    for node in kept.graph.node:
        if node.domain != KVC_DOMAIN or node.op_type not in native:
            continue
        for place, tensor in enumerate(OPERATORS[node.op_type].outputs):
            if tensor.optional and node.output[place] not in wanted:
                node.output[place] = ""
    return kept
