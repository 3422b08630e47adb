"""Prepare a graph for an executor that has some of the `kvc` operators itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from kvc_trt.graph.rewrites.fused import fuse
from kvc_trt.graph.rewrites.prune import prune, read_names
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.native import NATIVE_LINEAR, NATIVE_NARROW_LINEAR, native_name
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.operators.schema import Operator

_PRECISE = ("KvcPrefillAttention", NATIVE_LINEAR)
"""Native operators that also multiply in bfloat16, where their attribute `bf16` is 1."""
_BY_BODY = "_body"
"""Ends the name of an operator that is native, but not in this graph; profiles still count it as the operator."""


def native_in(nodes: Iterable[NodeProto], native: Collection[str]) -> Mapping[str, str]:
    """Return the operators of a graph that `native` computes, and the name of the native operator that does.

    A library need not have an operator for every cache format, nor for bounds in fp8. Nodes of an older engine that
    lack inputs which the operator has now keep their body.
    """
    own = [node for node in nodes if node.domain == KVC_DOMAIN]
    names = {node.op_type: native_name(node.op_type, _numbers(node)) for node in own}
    older = {node.op_type for node in own if node.op_type in OPERATORS and len(node.input) < len(_called(node).inputs)}
    return {operator: name for operator, name in names.items() if name in native and operator not in older}


def prepare(model: ModelProto, native: Collection[str]) -> ModelProto:
    """Return a pruned copy without the bodies of those operators that are `native_in` the graph.

    A native operator takes its outputs by place, so its calls keep them all; optional ones that nothing reads lose
    their name, and are not computed. The operations between products are native where an operator covers them.
    """
    computed = native_in(model.graph.node, native)
    kept = prune(model, except_for=computed)
    bodies = [body for body in kept.functions if body.name not in computed]
    del kept.functions[:]
    kept.functions.extend(bodies)
    _rename_bodies(kept, frozenset(native).difference(computed))
    wanted = {output.name for output in kept.graph.output} | read_names(kept.graph.node)
    for node in kept.graph.node:
        if node.domain != KVC_DOMAIN or node.op_type not in computed:
            continue
        for place, tensor in enumerate(_called(node).outputs):
            if tensor.optional and node.output[place] not in wanted:
                node.output[place] = ""
        node.op_type = computed[node.op_type]
    fuse(kept, native)
    return kept


def _called(node: NodeProto) -> Operator:
    """Return the operator that a node calls, in the form that its attributes name."""
    return OPERATORS[node.op_type].for_numbers(_numbers(node))


def _numbers(node: NodeProto) -> dict[str, int]:
    return {one.name: one.i for one in node.attribute}


def _rename_bodies(model: ModelProto, operators: Collection[str]) -> None:
    """Give bodies names of their own: a library's operator wins over a function of its name."""
    for body in model.functions:
        if body.name in operators:
            body.name += _BY_BODY
    for node in model.graph.node:
        if node.domain == KVC_DOMAIN and node.op_type in operators:
            node.op_type += _BY_BODY


def prepare_prefill(model: ModelProto, native: Collection[str], *, bf16: bool) -> ModelProto:
    """Return a copy of a prefill graph whose products with float32 matrices are native where the library has them.

    With `bf16` they, and attention, multiply in bfloat16. The head stays Gemm in float32: it has one token per row.
    """
    prepared = ModelProto()
    prepared.CopyFrom(model)
    graph = prepared.graph
    if NATIVE_LINEAR in native:
        constants = {one.name for one in graph.initializer if one.data_type == TensorProto.FLOAT}
        head = _head(graph.node)
        _replace_products(graph, NATIVE_LINEAR, lambda node: node is not head and _multiplies(node, constants))
    for node in graph.node:
        if bf16 and node.domain == KVC_DOMAIN and node.op_type in _PRECISE:
            node.attribute.append(helper.make_attribute("bf16", 1))
    return prepared


def prepare_draft(model: ModelProto, native: Collection[str]) -> ModelProto:
    """Return a copy of a draft graph whose products with float32 matrices are native where the library has them.

    A native step appends and attends in one node, so that the next one needs nothing that makes it wait.
    """
    prepared = ModelProto()
    prepared.CopyFrom(model)
    _drop_waiting(prepared.graph, native)
    if NATIVE_NARROW_LINEAR in native:
        constants = {one.name for one in prepared.graph.initializer if one.data_type == TensorProto.FLOAT}
        _replace_products(prepared.graph, NATIVE_NARROW_LINEAR, lambda node: _multiplies(node, constants))
    return prepared


def _drop_waiting(graph: GraphProto, native: Collection[str]) -> None:
    """Drop the nodes that let a token's lengths depend on a native result before it (`graph/decoder.py`)."""
    results = {node.output[0] for node in graph.node if node.domain == KVC_DOMAIN and node.op_type in native}
    waits = {node.output[0] for node in graph.node if node.op_type == "Shape" and node.input[0] in results}
    passed = {
        node.output[0]: node.input[0] for node in graph.node if node.op_type == "Expand" and node.input[1] in waits
    }
    kept = [NodeProto.FromString(node.SerializeToString()) for node in graph.node if node.output[0] not in passed]
    for node in kept:
        for place, name in enumerate(node.input):
            node.input[place] = passed.get(name, name)
    unread = waits - read_names(kept)
    del graph.node[:]
    graph.node.extend(node for node in kept if node.output[0] not in unread)


def _replace_products(graph: GraphProto, operator: str, wanted: Callable[[NodeProto], bool]) -> None:
    nodes = [made for node in graph.node for made in (_linear(node, operator) if wanted(node) else [node])]
    del graph.node[:]
    graph.node.extend(nodes)


def _multiplies(node: NodeProto, constants: set[str]) -> bool:
    """Return whether a node is x times a transposed constant matrix, plus at most a constant."""
    return (
        node.op_type == "Gemm"
        and {one.name: one.i for one in node.attribute} == {"transB": 1}
        and constants.issuperset(node.input[1:])
    )


def _linear(node: NodeProto, operator: str) -> list[NodeProto]:
    x, matrix, *bias = node.input
    product = f"{node.output[0]}.product" if bias else node.output[0]
    nodes = [helper.make_node(operator, [x, matrix], [product], name=node.name, domain=KVC_DOMAIN)]
    if bias:
        nodes.append(helper.make_node("Add", [product, bias[0]], list(node.output), name=f"{node.name}.bias"))
    return nodes


def _head(nodes: Collection[NodeProto]) -> NodeProto | None:
    """Return the product that the logits are copies of."""
    writers = {name: node for node in nodes for name in node.output}
    node = writers.get("logits")
    while node is not None and node.op_type in ("Identity", "Cast"):
        node = writers.get(node.input[0])
    return node
