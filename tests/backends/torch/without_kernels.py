"""The policies that PyTorch runs by its own operations, in whole or in part."""

from __future__ import annotations

from functools import cache

from kvc_trt.backends.torch.policy_path import policy_path
from tests.every_policy import EVERY, parameters_of
from tests.small_model import SMALL


@cache
def without_kernels() -> tuple[str, ...]:
    """Return the policies of `EVERY` without kernels; they need the package onnx."""
    return tuple(name for name in EVERY if policy_path(SMALL, parameters_of(name)) is not None)
