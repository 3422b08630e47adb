"""All operators, found by scanning this package: adding a file adds its operators."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping

import kvc_trt.operators
from kvc_trt.operators.schema import Operator


def _found() -> Iterator[Operator]:
    package = kvc_trt.operators
    for module in [entry.name for entry in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]:
        if module in (f"{package.__name__}.emitter", __name__):  # the one imports onnx, the other is this module
            continue
        members = vars(importlib.import_module(module)).values()
        yield from (member for member in members if isinstance(member, Operator))


OPERATORS: Mapping[str, Operator] = {one.name: one for one in sorted(_found(), key=lambda operator: operator.name)}
"""Every operator by name, in the order of names: generated files keep their order when a module moves."""

KERNEL_OPERATORS: tuple[Operator, ...] = tuple(one for one in OPERATORS.values() if one.kernel is not None)
"""The operators with a CUDA kernel: plugins in TensorRT, operators of `torch.ops.kvc` in PyTorch."""
