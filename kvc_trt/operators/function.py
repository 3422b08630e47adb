"""Writing an operator: its body as an ONNX function, and the node that calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnx import FunctionProto, NodeProto, helper

from kvc_trt.operators import KVC_DOMAIN, OPSET
from kvc_trt.operators.emitter import Emitter, Value

PLUGIN_ATTRIBUTES = {"plugin_namespace": KVC_DOMAIN, "plugin_version": "1"}


def call(emit: Emitter, name: str, inputs: Sequence[Value], outputs: int | Sequence[str], **attributes: int) -> Any:
    """Append a node of one of our operators."""
    return emit.call(name, *inputs, outputs=outputs, domain=KVC_DOMAIN, **attributes, **PLUGIN_ATTRIBUTES)


def function(
    name: str, inputs: Sequence[str], outputs: Mapping[str, Value], attributes: Sequence[str], emit: Emitter
) -> FunctionProto:
    """The function whose body `emit` has written; `outputs` maps formal names to values of the body."""
    names = {value: formal for formal, value in outputs.items()}
    _rename(emit.nodes, names)
    imports = [helper.make_opsetid("", OPSET)]
    return helper.make_function(KVC_DOMAIN, name, inputs, list(outputs), emit.nodes, imports, attributes)


def _rename(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> None:
    for node in nodes:
        for operands in (node.input, node.output):
            operands[:] = [names.get(operand, operand) for operand in operands]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g.node, names)
                for output in attribute.g.output:
                    output.name = names.get(output.name, output.name)
