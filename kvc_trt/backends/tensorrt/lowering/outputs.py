"""Passes on a graph's outputs: cache shapes that the parser can infer, and an extra output of the decode graph.

A layer that keeps the whole prompt pads it to its capacity by a computed amount. The result has the right size, but to
the parser it is unknown, so no memory could be planned. A Reshape to the declared size costs nothing.

A decode graph also returns each row's best token, so that a greedy step copies nothing else to the host. ArgMax would
become TensorRT's TopK, which does not document ties or NaN. The lowest position among those equal to the largest logit
is well defined.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from kvc_trt.backends.tensorrt.lowering.operators import TensorRtInstallation
from kvc_trt.operators.emitter import Emitter
from kvc_trt.runtime.executor import NOT_FINITE

COMPUTED_SIZE = frozenset(("Pad",))
"""Operators whose output size is computed from their inputs' values."""


def fix_output_shapes(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Put a Reshape to [batch, declared sizes] after every computed size that leaves the graph."""
    outputs = {output.name: output for output in model.graph.output}
    nodes: list[NodeProto] = []
    fixed = 0
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type in COMPUTED_SIZE and node.output[0] in outputs:
            nodes += _fixed(node, outputs[node.output[0]])
            fixed += 1
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return [f"fixed the shape of {fixed} outputs"] if fixed else []


def _fixed(node: NodeProto, output: ValueInfoProto) -> list[NodeProto]:
    dims = output.type.tensor_type.shape.dim
    sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in dims]  # 0 keeps the batch
    name = f"{output.name}.shape"
    node.output[0] = f"{output.name}.padded"
    constant = helper.make_tensor(name, TensorProto.INT64, [len(sizes)], sizes)
    return [
        helper.make_node("Constant", [], [name], name=name, value=constant),
        helper.make_node("Reshape", [node.output[0], name], [output.name], name=f"{output.name}.reshape"),
    ]


BEST = "best"
"""INT32 [batch]: the best token, the lowest among equal logits; NOT_FINITE if none can be drawn."""
LOGITS = "logits"


def add_best_token(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Add the output `best` to a decode graph; prefill always returns its logits."""
    logits = next((output for output in model.graph.output if output.name == LOGITS), None)
    if logits is None or not any(value.name == "token" for value in model.graph.input):
        return []
    batch, vocab = logits.type.tensor_type.shape.dim
    model.graph.node.extend(_best_token(vocab.dim_value))
    model.graph.output.append(helper.make_tensor_value_info(BEST, TensorProto.INT32, [batch.dim_param]))
    return [f"added {BEST}, each row's best of {vocab.dim_value} tokens"]


def _best_token(vocab: int) -> list[NodeProto]:
    """FLOAT logits [B,vocab] -> INT32 best [B].

    A NaN counts as position NOT_FINITE, which is below every token, so a row with a NaN returns it.
    """
    emit, columns = Emitter(), [1]
    broken, none = np.int32(NOT_FINITE), np.int32(vocab)
    with emit.scope(BEST):
        tokens = emit.Range(np.int32(0), np.int32(vocab), np.int32(1))
        largest = emit.ReduceMax(LOGITS, columns, keepdims=1)
        candidates = emit.Where(emit.Equal(LOGITS, largest), tokens, none)
        lowest = emit.ReduceMin(emit.Where(emit.IsNaN(LOGITS), broken, candidates), columns, keepdims=1)
        emit.Squeeze(emit.Where(emit.IsInf(largest), broken, lowest), columns, outputs=[BEST])
    return emit.nodes
