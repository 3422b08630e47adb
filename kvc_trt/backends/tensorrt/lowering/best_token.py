"""One more output of a decode graph: each row's best token. A greedy step copies nothing else to the host.

ArgMax becomes TensorRT's TopK, of which nothing says which of equal values it takes, nor what it makes of a NaN. The
lowest position of those that equal the largest logit is the same token whoever computes it.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from kvc_trt.backends.tensorrt.lowering.target import Target
from kvc_trt.operators.emitter import Emitter
from kvc_trt.runtime.executor import NOT_FINITE

BEST = "best"
"""INT32 [batch]: of equal logits the lowest token, or NOT_FINITE for a row that none can be drawn from."""
LOGITS = "logits"


def add_best_token(model: ModelProto, target: Target) -> list[str]:
    """Give a decode graph the output `best`. A prompt's logits are always asked for, and no other graph has any."""
    logits = next((output for output in model.graph.output if output.name == LOGITS), None)
    if logits is None or not any(value.name == "token" for value in model.graph.input):
        return []
    batch, vocab = logits.type.tensor_type.shape.dim
    model.graph.node.extend(_best_token(vocab.dim_value))
    model.graph.output.append(helper.make_tensor_value_info(BEST, TensorProto.INT32, [batch.dim_param]))
    return [f"added {BEST}, each row's best of {vocab.dim_value} tokens"]


def _best_token(vocab: int) -> list[NodeProto]:
    """FLOAT logits [B,vocab] -> INT32 best [B].

    A NaN counts as position NOT_FINITE, which is below every token: it is what a row that holds one answers.
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
