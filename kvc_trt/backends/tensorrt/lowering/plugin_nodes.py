"""Nodes of ours as the plugins want them: named, with the fields that the plugin has, and nothing else."""

from __future__ import annotations

from onnx import ModelProto, NodeProto, helper

from kvc_trt.backends.tensorrt.lowering.target import Target
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.registry import KERNEL_OPERATORS
from kvc_trt.operators.schema import PLUGIN_ATTRIBUTES

FIELDS: dict[str, tuple[str, ...]] = {
    operator.name: tuple(attribute.name for attribute in operator.attributes) for operator in KERNEL_OPERATORS
}
"""Attributes of each operator that its plugin takes as fields; all of them, each one INT."""

OPERATORS = frozenset(FIELDS)
"""Every operator with a plugin."""


def name_plugins(model: ModelProto, target: Target) -> list[str]:
    """Give every node of ours `plugin_namespace` and `plugin_version`, and drop attributes that are no fields."""
    counts: dict[str, int] = {}
    for node in model.graph.node:
        if node.domain == KVC_DOMAIN:
            _rewrite(node, target)
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return [f"{count} x {name} as plugin" for name, count in counts.items()]


def _rewrite(node: NodeProto, target: Target) -> None:
    place = f"{node.op_type} ({node.name or 'unnamed'})"
    if node.op_type not in FIELDS:
        raise InputError(f"{place}: no plugin serves this operator, expected one of {', '.join(FIELDS)}")
    if node.op_type not in target.plugins:
        known = ", ".join(sorted(target.plugins)) or "none"
        raise UnsupportedEnvironment(
            f"{place}: its plugin is not in the registry, found {known}",
            hint="kvc-trt doctor shows the plugin library in use",
        )
    fields = {attribute.name: attribute.i for attribute in node.attribute}
    if missing := [name for name in FIELDS[node.op_type] if name not in fields]:
        raise InputError(f"{place}: no attribute {', '.join(missing)}")
    del node.attribute[:]
    for name in FIELDS[node.op_type]:
        node.attribute.append(helper.make_attribute(name, fields[name]))
    for name, value in PLUGIN_ATTRIBUTES.items():
        node.attribute.append(helper.make_attribute(name, value))
