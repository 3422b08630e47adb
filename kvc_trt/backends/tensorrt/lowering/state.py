"""State that a compaction after a turn rewrites: plugins that overwrite it in place.

A compaction reads stored and new tokens from one table and returns new tensors, so its plugin has no state to alias. A
plugin behind it overwrites the state. Every reader of the old state has run by then: the compaction depends on it.

NVIDIA's builder (TensorRT-RTX 1.7.1) makes no plan where one plugin reads a state tensor of codes and another one
overwrites it ("cannot be quantized"). It does where both take it from a plugin that shares its buffer. That plugin is
KvcAppendBlock, given no tokens: it writes nothing. ONNX Runtime needs no such node, so it comes after the passes whose
graphs ONNX Runtime executes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from onnx import ModelProto, NodeProto, TensorProto

from kvc_trt.backends.tensorrt.lowering.checks import expected_aliases, updated_in_place
from kvc_trt.backends.tensorrt.lowering.operators import TensorRtInstallation, format_of
from kvc_trt.errors import InputError
from kvc_trt.models.cache_formats import CacheFormat
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.schema import CACHE_FORMAT, Operator
from kvc_trt.operators.shapes import HeadShape, Layout
from kvc_trt.operators.tensors import BOUNDS, FP8_BOUNDS
from kvc_trt.operators.turns.append_block import APPEND_BLOCK
from kvc_trt.operators.turns.join_block import JOIN_BLOCK
from kvc_trt.operators.turns.replace import REPLACE_BOUNDS, REPLACE_CACHE

KEPT, UPDATED, HANDED_ON = "_kept.", "_out.", "_handed_on."


def overwrite_state(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Let a plugin overwrite the state tensors of a graph that no other plugin updates in place."""
    wanted = expected_aliases(model)
    made = updated_in_place(model)
    left = {output: state for output, state in wanted.items() if made.get(output) != state}
    if not left:
        return []
    _rename(model, {output: output.replace(UPDATED, KEPT, 1) for output in left})
    emit, notes, form = Emitter(), [], format_of(model)
    for operator in (REPLACE_CACHE.in_format(form), REPLACE_BOUNDS):
        sites = _sites(operator, left.values())
        for site in sites:
            _overwrite(emit, operator, site, _attributes(model, operator, site))
            for tensor in operator.outputs:
                del left[f"{tensor.name}.{site}"]
        if sites:
            # Its body reads no number of the engine.
            model.functions.append(operator.body(Layout(HeadShape(None, None, 1), cache_format=form)))
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
    """Return the attributes of a node of `operator`: its format, and where it has bounds, whether they are fp8."""
    if operator.form is not None:
        return {CACHE_FORMAT.name: operator.form.code}
    if FP8_BOUNDS not in operator.attributes:
        return {}
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    return {FP8_BOUNDS.name: int(types[f"{BOUNDS.name}.{site}"] == TensorProto.INT8)}


def _overwrite(emit: Emitter, operator: Operator, site: str, attributes: Mapping[str, int]) -> None:
    """Append a node of `operator`: its first inputs are a cache's state, the others the tensors that replace it."""
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


def hand_on_state(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Put a KvcAppendBlock of no tokens before each node that reads a cache of codes that another plugin overwrites."""
    form = format_of(model)
    overwritten = {node.input[0] for node in model.graph.node if node.op_type == REPLACE_CACHE.name}
    if form.keys is None or not overwritten:
        return []
    handed_on: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type == JOIN_BLOCK.name:
            names = (tensor.name for tensor in JOIN_BLOCK.in_format(form).inputs)
            inputs = dict(zip(names, node.input, strict=True))
            if inputs["k_cache"] in overwritten:
                nodes += _appending_nothing(node.name, form, inputs, handed_on)
        for index, name in enumerate(node.input):
            node.input[index] = handed_on.get(name, name)
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return [f"{len(overwritten)} x {APPEND_BLOCK.name} of no tokens before a compaction"]


def _appending_nothing(
    name: str, form: CacheFormat, inputs: Mapping[str, str], handed_on: dict[str, str]
) -> list[NodeProto]:
    """Return the nodes, and add the value that passes on each state tensor to `handed_on`."""
    operator, emit = APPEND_BLOCK.in_format(form), Emitter()
    own = {tensor.name: inputs[tensor.name].replace(".", HANDED_ON, 1) for tensor in operator.state}
    handed_on |= {inputs[state]: value for state, value in own.items()}
    with emit.scope(name):
        given = {**inputs, "lengths": emit.Sub(inputs["lengths"], inputs["lengths"])}
        outputs = {tensor.name: own[tensor.alias or ""] for tensor in operator.outputs}
        operator.call(emit, given, outputs, **{CACHE_FORMAT.name: form.code})
    return emit.nodes
