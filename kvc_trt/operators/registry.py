"""All operators, found by scanning this package: adding a file adds its operators."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping

import kvc_trt.operators
from kvc_trt.operators.schema import Operator


def _found() -> Iterator[Operator]:
    for module in sorted(entry.name for entry in pkgutil.iter_modules(kvc_trt.operators.__path__)):
        if module in ("emitter", "registry"):  # the one imports onnx, the other is this module
            continue
        members = vars(importlib.import_module(f"kvc_trt.operators.{module}")).values()
        yield from (member for member in members if isinstance(member, Operator))


OPERATORS: Mapping[str, Operator] = {operator.name: operator for operator in _found()}
"""Every operator by name."""

KERNEL_OPERATORS: tuple[Operator, ...] = tuple(one for one in OPERATORS.values() if one.kernel is not None)
"""The operators with a CUDA kernel: plugins in TensorRT, operators of `torch.ops.kvc` in PyTorch."""
