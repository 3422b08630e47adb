"""Lower the extend graph: attention of a turn's tokens, and positions of the kept ones.

Attention becomes the ONNX operator Attention with a mask: query i of row b sees the first cache_lengths[b] + i + 1
entries. TensorRT's causal masks do not fit, since they are anchored at a corner and rows store different numbers of
entries. The mask takes one byte per query and entry.

Keys and values in a format are widened to the type of the queries before it: TensorRT's attention reads no codes.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, inliner

from kvc_trt.backends.tensorrt.lowering.attention import query_type, scale, scaled_query
from kvc_trt.backends.tensorrt.lowering.operators import TensorRtInstallation, format_of
from kvc_trt.models.cache_formats import FP8, VectorFormat
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.cache_formats import write_read
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.shapes import HeadShape, Layout, count_to, int32, size
from kvc_trt.operators.turns.extend_attention import EXTEND_ATTENTION, TURN_KEYS, TURN_VALUES
from kvc_trt.operators.turns.keep_positions import KEEP_POSITIONS
from kvc_trt.operators.vectors import Vectors, stored_tables


def mask_turn_attention(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Replace every KvcExtendAttention by a scaled query, a mask, and Attention."""
    count = sum(node.op_type == EXTEND_ATTENTION.name for node in model.graph.node)
    if not count:
        return []
    element, head_size = query_type(model, EXTEND_ATTENTION)
    layout = Layout(HeadShape(None, None, head_size), cache_format=format_of(model))
    nodes = [scale(head_size)]
    for node in model.graph.node:
        nodes += _attention(node, element, layout) if node.op_type == EXTEND_ATTENTION.name else [node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return [
        f"{count} x {EXTEND_ATTENTION.name} as Attention with a mask, queries scaled by 1/sqrt({head_size}) in fp32"
    ]


def _attention(node: NodeProto, element: int, layout: Layout) -> list[NodeProto]:
    """Return the nodes for (q [B,H,M,D], k, v [B,G,T,D], cache_lengths [B]) -> o [B,H,M,D]; q, k, v of `element`."""
    query, *parts, stored = node.input
    emit = Emitter()
    with emit.scope(node.name):
        tables = stored_tables(layout, TURN_KEYS, TURN_VALUES).of(parts)
        keys, values = (_widened(emit, vectors, element, layout) for vectors in (tables.keys, tables.values))
        # In 32 bits: positions fit, and every version of TensorRT compares them.
        before = int32(emit, emit.Reshape(stored, [-1, 1, 1, 1]))
        last_seen = emit.Add(before, emit.Reshape(_count(emit, query), [1, 1, -1, 1]))
        mask = emit.LessOrEqual(emit.Reshape(_count(emit, keys), [1, 1, 1, -1]), last_seen)
    scaled = scaled_query(query, node.name, element)
    inputs = [*scaled[-1].output, keys, values, mask]
    return [*emit.nodes, *scaled, helper.make_node("Attention", inputs, node.output, name=node.name, scale=1.0)]


def _widened(emit: Emitter, vectors: Vectors, element: int, layout: Layout) -> Value:
    """Return vectors [B,G,T,D] of type `element`: exact ones as they are, those in a format dequantised."""
    if vectors.format is None:
        return vectors.parts[0]
    codes, scales, *minima = vectors.parts
    numbers = [_number(emit, codes, vectors.format), scales, *minima]
    if vectors.format == FP8:
        numbers[1] = _number(emit, scales, FP8)
    read = write_read(emit, tuple(numbers), vectors.format)
    if vectors.format.grouped:
        read = str(emit.Reshape(read, [0, 0, -1, layout.shape.head_size]))  # the parser follows no computed shape
    return read if element == TensorProto.FLOAT else str(emit.call("Cast", read, to=element))


def _number(emit: Emitter, part: Value, form: VectorFormat) -> Value:
    """Return bytes INT8 as FLOAT, from 0 to 255 where they index a table.

    TensorRT takes INT8 numbers as quantised; this gives their scale.
    """
    number = str(emit.DequantizeLinear(part, np.float32(1)))
    if form != FP8:
        return number
    return str(emit.Where(emit.Less(number, np.float32(0)), emit.Add(number, np.float32(256)), number))


def _count(emit: Emitter, table: str) -> str:
    """Return 0, 1, ... along axis 2 of `table` [B,.,n,D], INT32 [n]."""
    return int32(emit, count_to(emit, size(emit, table, 2)))


def write_out_positions(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Write out KvcKeepPositions, a few operators on integers, by its body."""
    count = sum(node.op_type == KEEP_POSITIONS.name for node in model.graph.node)
    if not count:
        return []
    model.CopyFrom(inliner.inline_selected_functions(model, [(KVC_DOMAIN, KEEP_POSITIONS.name)]))
    return [f"wrote out {count} x {KEEP_POSITIONS.name}"]
