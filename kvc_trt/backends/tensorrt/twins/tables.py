"""What tells one plugin from another, as tables: attributes with their ranges, tensors with symbolic shapes.

The same tables stand in C++ in plugins_cuda/tensorrt/; tests compare them line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvc_trt.backends.tensorrt.twins.sizes import Sizes
from kvc_trt.kernels.structs import Parameters

NAMESPACE = "kvc"
VERSION = "1"

INT32_MAX = 2**31 - 1
MAX_TOKENS = 2**20
MAX_HEAD_SIZE = 256

CACHE = "cache"
"""Element type of a tensor that has the type of the cache: float32, float16 or bfloat16, one for all of a call."""
INT64, INT32 = "INT64", "INT32"


@dataclass(frozen=True)
class Field:
    """One attribute of the node, always one INT32, always there; both ends of its range are allowed."""

    name: str
    minimum: int
    maximum: int


@dataclass(frozen=True)
class Tensor:
    """One input or output."""

    name: str
    element: str
    """CACHE, or the name of TensorRT's type"""
    shape: tuple[str, ...]
    """symbols of `sizes.NAMES`"""
    alias: int | None = None
    """of an output: the input whose buffer it is"""


@dataclass(frozen=True)
class Operator:
    """One plugin: tables, and what these cannot say."""

    name: str
    operation: str
    """symbol of the C ABI; its workspace is `<operation>_workspace`"""
    parameters: type[Parameters]
    """struct of the C ABI"""
    fields: tuple[Field, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    check: Callable[[Mapping[str, int]], None]
    """raises Refusal for attributes that do not fit together"""
    derive: Callable[[Mapping[str, int], Sizes], None]
    """adds the sizes that follow from attributes and from other sizes, as far as these are known"""
    extra: Callable[[Sizes], Mapping[str, int]] = lambda sizes: {}
    """numbers of the struct that are neither attributes nor sizes"""
