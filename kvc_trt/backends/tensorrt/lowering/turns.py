"""Lower the extend graph: attention of a turn's tokens, positions of what stays, and state that a compaction rewrites.

Attention becomes the ONNX operator Attention with a mask: query i of row b sees the first cache_lengths[b] + i + 1
entries. TensorRT's causal masks do not fit, since they are anchored at a corner and rows store different numbers of
entries. The mask takes one byte per query and entry.

A compaction reads stored and new tokens from one table and returns new tensors, so its plugin has no state to alias. A
plugin behind it overwrites the state. Whatever reads the old state has run by then: the compaction depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from onnx import ModelProto, NodeProto, TensorProto, helper, inliner

from kvc_trt.backends.tensorrt.lowering.attention import cache_type, scale, scaled_query
from kvc_trt.backends.tensorrt.lowering.checks import expected_aliases, updated_in_place
from kvc_trt.backends.tensorrt.lowering.operators import Installation
from kvc_trt.errors import InputError
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.schema import Operator
from kvc_trt.operators.shapes import HeadShape, Layout, count_to, int32, size
from kvc_trt.operators.tensors import BOUNDS, FP8_BOUNDS
from kvc_trt.operators.turns.extend_attention import EXTEND_ATTENTION
from kvc_trt.operators.turns.keep_positions import KEEP_POSITIONS
from kvc_trt.operators.turns.replace import REPLACE_BOUNDS, REPLACE_CACHE

KEPT, UPDATED = "_kept.", "_out."


def mask_turn_attention(model: ModelProto, at_hand: Installation) -> list[str]:
    """Replace every KvcExtendAttention by a scaled query, a mask, and Attention."""
    count = sum(node.op_type == EXTEND_ATTENTION.name for node in model.graph.node)
    if not count:
        return []
    element, head_size = cache_type(model)
    nodes = [scale(head_size)]
    for node in model.graph.node:
        nodes += _attention(node, element) if node.op_type == EXTEND_ATTENTION.name else [node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return [
        f"{count} x {EXTEND_ATTENTION.name} as Attention with a mask, queries scaled by 1/sqrt({head_size}) in fp32"
    ]


def _attention(node: NodeProto, element: int) -> list[NodeProto]:
    """Return the nodes for (q [B,H,M,D], k, v [B,G,T,D], cache_lengths [B]) -> o [B,H,M,D]; q, k, v of `element`."""
    query, keys, values, stored = node.input
    emit = Emitter()
    with emit.scope(node.name):
        # In 32 bits: positions fit, and every version of TensorRT compares them.
        before = int32(emit, emit.Reshape(stored, [-1, 1, 1, 1]))
        last_seen = emit.Add(before, emit.Reshape(_count(emit, query), [1, 1, -1, 1]))
        mask = emit.LessOrEqual(emit.Reshape(_count(emit, keys), [1, 1, 1, -1]), last_seen)
    scaled = scaled_query(query, node.name, element)
    inputs = [*scaled[-1].output, keys, values, mask]
    return [*emit.nodes, *scaled, helper.make_node("Attention", inputs, node.output, name=node.name, scale=1.0)]


def _count(emit: Emitter, table: str) -> str:
    """Return 0, 1, ... along axis 2 of `table` [B,.,n,D], INT32 [n]."""
    return int32(emit, count_to(emit, size(emit, table, 2)))


def write_out_positions(model: ModelProto, at_hand: Installation) -> list[str]:
    """Write out KvcKeepPositions, a few operators on integers, by its body."""
    count = sum(node.op_type == KEEP_POSITIONS.name for node in model.graph.node)
    if not count:
        return []
    model.CopyFrom(inliner.inline_selected_functions(model, [(KVC_DOMAIN, KEEP_POSITIONS.name)]))
    return [f"wrote out {count} x {KEEP_POSITIONS.name}"]


def overwrite_state(model: ModelProto, at_hand: Installation) -> list[str]:
    """Let a plugin overwrite the state tensors of a graph that no other plugin updates in place."""
    wanted = expected_aliases(model)
    made = updated_in_place(model)
    left = {output: state for output, state in wanted.items() if made.get(output) != state}
    if not left:
        return []
    _rename(model, {output: output.replace(UPDATED, KEPT, 1) for output in left})
    emit, notes = Emitter(), []
    for operator in (REPLACE_CACHE, REPLACE_BOUNDS):
        sites = _sites(operator, left.values())
        for site in sites:
            _overwrite(emit, operator, site, _attributes(model, operator, site))
            for tensor in operator.outputs:
                del left[f"{tensor.name}.{site}"]
        if sites:
            # Its body reads no number of the engine.
            model.functions.append(operator.body(Layout(HeadShape(None, None, 1))))
            notes.append(f"{len(sites)} x {operator.name} behind a compaction")
    if left:
        raise InputError(f"graph {model.graph.name}: no plugin updates {', '.join(left.values())} in place")
    model.graph.node.extend(emit.nodes)
    return notes


def _sites(operator: Operator, states: Collection[str]) -> list[str]:
    """Return the caches ("3", "3.1") of which all state tensors of `operator` are among `states`."""
    first, *others = (tensor.name for tensor in operator.state)
    sites = [state.removeprefix(f"{first}.") for state in states if state.startswith(f"{first}.")]
    return [site for site in sites if all(f"{name}.{site}" in states for name in others)]


def _attributes(model: ModelProto, operator: Operator, site: str) -> dict[str, int]:
    """Return the attributes of a node of `operator`: whether the bounds of a cache are fp8, where it has bounds."""
    if FP8_BOUNDS not in operator.attributes:
        return {}
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    return {FP8_BOUNDS.name: int(types[f"{BOUNDS.name}.{site}"] == TensorProto.INT8)}


def _overwrite(emit: Emitter, operator: Operator, site: str, attributes: Mapping[str, int]) -> None:
    """Append a node of `operator`: its first inputs are a cache's state, the others what is kept of it."""
    state = [f"{tensor.name}.{site}" for tensor in operator.state]
    kept = [f"{tensor.name}{KEPT}{site}" for tensor in operator.state]
    names = [tensor.name for tensor in operator.inputs]
    outputs = {tensor.name: f"{tensor.name}.{site}" for tensor in operator.outputs}
    with emit.scope(f"caches.{site}"):
        operator.call(emit, dict(zip(names, [*state, *kept], strict=True)), outputs, **attributes)


def _rename(model: ModelProto, names: Mapping[str, str]) -> None:
    """Give values of the graph new names; its outputs keep theirs."""
    for node in model.graph.node:
        for values in (node.input, node.output):
            for index, name in enumerate(values):
                values[index] = names.get(name, name)
