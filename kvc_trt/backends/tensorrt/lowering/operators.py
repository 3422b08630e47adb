"""What must hold before anything is rewritten: a TensorRT that reads these graphs, and a graph that it can read."""

from __future__ import annotations

from onnx import ModelProto, NodeProto

from kvc_trt.backends.tensorrt.lowering.target import FIRST_FOR_GRAPHS, Target
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.graph import CONTRIB_DOMAIN
from kvc_trt.operators import KVC_DOMAIN, OPSET

REFUSED = {
    "Swish": "TensorRT reads it from 11.0 on only; expected Sigmoid and Mul",
    "Loop": "TensorRT would unroll it into layers; expected an operator of ours in its place",
    "TensorScatter": "it needs a static, uncompressed cache; expected an operator of ours in its place",
}


def check_operators(model: ModelProto, target: Target) -> list[str]:
    """Raise for a graph that this TensorRT cannot run as intended. Changes nothing."""
    if target.tensorrt < FIRST_FOR_GRAPHS:
        found, needed = (".".join(map(str, version)) for version in (target.tensorrt, FIRST_FOR_GRAPHS))
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
    if node.domain == CONTRIB_DOMAIN:
        raise InputError(
            f"{place}: weights quantised for ONNX Runtime, which TensorRT does not read",
            hint="build with --weights bf16 or fp16, or with --backend onnxruntime",
        )
    if node.domain not in ("", KVC_DOMAIN):
        raise InputError(f"{place}: operator of domain {node.domain!r}, expected ONNX or {KVC_DOMAIN}")
    if node.domain == "" and node.op_type in REFUSED:
        raise InputError(f"{place}: {REFUSED[node.op_type]}")
