"""Map attention over a prompt to TensorRT's fused layer.

It becomes the ONNX operator Attention, which every supported TensorRT reads in the same form. (The parser's own
TRT_Attention names its causal mask differently from version to version, and is silently not causal if it does not know
the name.) `is_causal` anchors the mask at the upper left corner; a prompt attends to itself, so the mask is square and
the corner does not matter. Queries may have more heads than keys.

Scale: by default the parser multiplies queries and keys by 1/sqrt(sqrt(D)), which it computes with two square roots and
a reciprocal in the activations' type. In bfloat16 with D = 128 every score is then 0.3 % too small, like a temperature.
So queries are scaled beforehand, in fp32 and rounded once, and the operator scales by one.

TensorRT has fused attention only for 16-bit types, and refuses to build an fp32 one unless it may decompose it into
several kernels, whose scores need memory quadratic in the prompt. For 16-bit types this is not allowed: a build without
a fused kernel must fail instead of becoming slow and large.
"""

from __future__ import annotations

import math

from onnx import ModelProto, NodeProto, TensorProto, helper

from kvc_trt.backends.tensorrt.lowering.operators import TensorRtInstallation
from kvc_trt.backends.tensorrt.lowering.widths import KnownShapes
from kvc_trt.errors import InputError
from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.schema import Operator

SCALE = "attention.scale"


def fuse_prefill_attention(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Replace every KvcPrefillAttention by a scaled query and Attention."""
    if not any(node.op_type == PREFILL_ATTENTION.name for node in model.graph.node):
        return []
    element, head_size = query_type(model, PREFILL_ATTENTION)
    nodes = [scale(head_size)]
    fused = 0
    for node in model.graph.node:
        if node.op_type != PREFILL_ATTENTION.name:
            nodes.append(node)
            continue
        nodes += _attention(node, element)
        fused += 1
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return [f"{fused} x {PREFILL_ATTENTION.name} as Attention, queries scaled by 1/sqrt({head_size}) in fp32"]


def _attention(node: NodeProto, element: int) -> list[NodeProto]:
    """Return the nodes for (q [B,H,S,D], k, v [B,G,S,D]) -> o [B,H,S,D], all of type `element`."""
    query, keys, values = node.input
    before = scaled_query(query, node.name, element)
    inputs = [*before[-1].output, keys, values]
    return [*before, helper.make_node("Attention", inputs, node.output, name=node.name, is_causal=1, scale=1.0)]


def scaled_query(query: str, name: str, element: int) -> list[NodeProto]:
    """Return the nodes that scale queries of type `element` in fp32; the last one's output has that type again."""
    wide, product, scaled = (f"{name}.{part}" for part in ("wide", "product", "scaled"))
    if element == TensorProto.FLOAT:
        return [helper.make_node("Mul", [query, SCALE], [scaled], name=scaled)]
    return [
        helper.make_node("Cast", [query], [wide], name=wide, to=TensorProto.FLOAT),
        helper.make_node("Mul", [wide, SCALE], [product], name=product),
        helper.make_node("Cast", [product], [scaled], name=scaled, to=element),
    ]


def scale(head_size: int) -> NodeProto:
    """Return the constant by which `scaled_query` multiplies, once per graph."""
    value = helper.make_tensor(SCALE, TensorProto.FLOAT, [1], [1 / math.sqrt(head_size)])
    return helper.make_node("Constant", [], [SCALE], name=SCALE, value=value)


def query_type(model: ModelProto, attention: Operator) -> tuple[int, int]:
    """Return element type and head size of the queries of the graph's nodes of `attention`; keys and values are read
    in that type, whatever they are stored in."""
    query = next(node.input[0] for node in model.graph.node if node.op_type == attention.name)
    known = KnownShapes(model)
    for node in model.graph.node:
        known.follow(node)
    shape = known.shape(query)
    if shape is None or shape[-1] is None:
        raise InputError(f"graph {model.graph.name}: the head size of {query} is not known")
    return element_type(model, query), shape[-1]


def element_type(model: ModelProto, value: str) -> int:
    """Return the type of a value: of the last cast before it, or of the weight or input from which it is computed."""
    types: dict[str, int] = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    types |= {given.name: given.type.tensor_type.elem_type for given in model.graph.input}
    producers = {output: node for node in model.graph.node for output in node.output}
    while value not in types:
        node = producers[value]
        if node.op_type == "Cast":
            return int(next(attribute.i for attribute in node.attribute if attribute.name == "to"))
        value = node.input[0]
    return types[value]


def let_fp32_attention_decompose(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Set `TRT_decomposable`, an attribute of NVIDIA's parser, on every Attention of an fp32 graph."""
    attention = [node for node in model.graph.node if node.op_type == "Attention"]
    if not attention or element_type(model, attention[0].input[0]) != TensorProto.FLOAT:
        return []
    for node in attention:
        node.attribute.append(helper.make_attribute("TRT_decomposable", 1))
    return [f"fp32: {len(attention)} x Attention without a fused kernel, scores in memory"]
