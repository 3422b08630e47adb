"""Check which operators a TensorRT version reads, and make it find ours.

The first pass checks the graph before anything is rewritten. The last ones give our nodes exactly the fields of their
plugins and remove their bodies: with a body, a missing plugin silently becomes a hundred slow layers; without one it is
an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import ModelProto, NodeProto, helper

from kvc_trt.backends.tensorrt import parts
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.models.cache_formats import CacheFormat, format_of_code
from kvc_trt.operators import CONTRIB_DOMAIN, KVC_DOMAIN, OPSET
from kvc_trt.operators.experts import OF_EXPERTS
from kvc_trt.operators.quantised_linear import QUANTISED_LINEAR, QUANTISED_ROWS
from kvc_trt.operators.registry import KERNEL_OPERATORS
from kvc_trt.operators.schema import CACHE_FORMAT, OF_SOME_CALLS, PLUGIN_ATTRIBUTES, SOFTMAX
from kvc_trt.operators.tensors import SINCE_BEFORE

QUANTISED = (QUANTISED_LINEAR.name, QUANTISED_ROWS.name)
"""Operators whose matrices no version of TensorRT reads."""

FIRST_FOR_GRAPHS = (10, 15)
"""First version whose parser reads RMSNormalization and RotaryEmbedding."""

FIRST_FOR_PLUGINS = (10, 14)
"""First version with all that networks without a parser need: plugins with aliases, and an attention layer."""


@dataclass(frozen=True)
class TensorRtInstallation:
    """A TensorRT version and the available plugins."""

    tensorrt: tuple[int, int]
    """Major and minor version."""
    plugins: frozenset[str]
    """Operators with a plugin in the library, or with a Python plugin in the registry."""


REFUSED = {
    "Swish": "TensorRT reads it from 11.0 on only; expected Sigmoid and Mul",
    "Loop": "TensorRT would unroll it into layers; expected an operator of ours in its place",
    "TensorScatter": "it needs a static, uncompressed cache; expected an operator of ours in its place",
}


def check_operators(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Raise for a graph that this TensorRT cannot run as intended. Changes nothing."""
    if at_hand.tensorrt < FIRST_FOR_GRAPHS:
        found, needed = (".".join(map(str, version)) for version in (at_hand.tensorrt, FIRST_FOR_GRAPHS))
        raise UnsupportedEnvironment(
            f"TensorRT {found}: its parser cannot read these graphs, expected {needed} or newer",
            hint="pip install --upgrade tensorrt",
        )
    for entry in model.opset_import:
        if entry.domain == "" and entry.version != OPSET:
            raise InputError(f"graph {model.graph.name}: opset {entry.version}, expected {OPSET}", hint="rebuild it")
    for node in model.graph.node:
        _check(node)
    return []


def _check(node: NodeProto) -> None:
    place = f"{node.op_type} ({node.name or 'unnamed'})"
    if node.domain == CONTRIB_DOMAIN or node.op_type in QUANTISED:
        raise InputError(
            f"{place}: weights quantised for ONNX Runtime, which TensorRT does not read",
            hint="build with --weights bf16 or fp16, or with --backend onnxruntime",
        )
    if node.op_type in OF_EXPERTS:
        raise InputError(
            f"{place}: TensorRT has no {parts.EXPERTS}",
            hint="build with --backend torch or onnxruntime",
        )
    if any(one.name == SOFTMAX.name and one.i for one in node.attribute):
        raise InputError(
            f"{place}: TensorRT has no {parts.SOFTMAX}",
            hint="build with --backend torch or onnxruntime",
        )
    if node.domain not in ("", KVC_DOMAIN):
        raise InputError(f"{place}: operator of domain {node.domain!r}, expected ONNX or {KVC_DOMAIN}")
    if node.domain == "" and node.op_type in REFUSED:
        raise InputError(f"{place}: {REFUSED[node.op_type]}")


FIELDS: dict[str, tuple[str, ...]] = {
    operator.name: tuple(attribute.name for attribute in operator.attributes) for operator in KERNEL_OPERATORS
}
"""Attributes of each operator that are fields of its plugin, all required INTs; some nodes also have OF_SOME_CALLS."""

PLUGINS = frozenset(FIELDS)
"""Every operator with a plugin."""


def format_of(model: ModelProto) -> CacheFormat:
    """Return the format of a graph's caches, the same for all of them."""
    codes = {
        attribute.i for node in model.graph.node for attribute in node.attribute if attribute.name == CACHE_FORMAT.name
    }
    return format_of_code(max(codes, default=0))


def name_plugins(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Give each of our nodes `plugin_namespace` and `plugin_version`, and drop attributes that are not fields."""
    counts: dict[str, int] = {}
    for node in model.graph.node:
        if node.domain == KVC_DOMAIN:
            _rewrite(node, at_hand)
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return [f"{count} x {name} as plugin" for name, count in counts.items()]


def _rewrite(node: NodeProto, at_hand: TensorRtInstallation) -> None:
    place = f"{node.op_type} ({node.name or 'unnamed'})"
    if node.op_type not in FIELDS:
        raise InputError(f"{place}: no plugin serves this operator, expected one of {', '.join(FIELDS)}")
    if node.op_type not in at_hand.plugins:
        known = ", ".join(sorted(at_hand.plugins)) or "none"
        raise UnsupportedEnvironment(
            f"{place}: its plugin is not in the registry, found {known}",
            hint="kvc-trt doctor shows the plugin library in use",
        )
    fields = SINCE_BEFORE | {attribute.name: attribute.i for attribute in node.attribute}
    names = [*FIELDS[node.op_type], *(one.name for one in OF_SOME_CALLS if one.name in fields)]
    if missing := [name for name in names if name not in fields]:
        raise InputError(f"{place}: no attribute {', '.join(missing)}")
    del node.attribute[:]
    for name in names:
        node.attribute.append(helper.make_attribute(name, fields[name]))
    for name, value in PLUGIN_ATTRIBUTES.items():
        node.attribute.append(helper.make_attribute(name, value))


def drop_functions(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Remove every model-local function; the file on disk keeps them for other executors."""
    dropped = [body.name for body in model.functions]
    del model.functions[:]
    return [f"dropped the body of {name}" for name in dropped]
