"""KvcCompact: keeps the part of a prompt's cache that its last queries look at (plugins_cuda/include/kvc/compact.h)."""

from __future__ import annotations

from collections.abc import Mapping

from kvc_trt.backends.tensorrt.twins.report import Refusal
from kvc_trt.backends.tensorrt.twins.sizes import Sizes, pages
from kvc_trt.backends.tensorrt.twins.tables import CACHE, INT32, INT32_MAX, INT64, MAX_TOKENS, Field, Operator, Tensor
from kvc_trt.kernels.structs import struct_of
from kvc_trt.operators import compact as operators


def _check(fields: Mapping[str, int]) -> None:
    pool_kernel, budget, capacity = (fields[name] for name in ("pool_kernel", "prompt_budget", "capacity"))
    if pool_kernel % 2 == 0:
        raise Refusal(f"field pool_kernel: expected an odd number, found {pool_kernel}")
    if budget > capacity:
        raise Refusal(f"field prompt_budget: expected at most the capacity of {capacity}, found {budget}")


def _derive(fields: Mapping[str, int], sizes: Sizes) -> None:
    sizes.fix("C", fields["capacity"], "field capacity")
    sizes.fix("P", pages(sizes["C"], fields["page_size"]), "field page_size")
    if "D" in sizes:
        sizes.fix("2D", 2 * sizes["D"], "bounds")


def _strides(sizes: Sizes) -> dict[str, int]:
    """Of k and v, which TensorRT always passes contiguous."""
    head = sizes["D"] * sizes["S"]
    return {"kv_stride_token": sizes["D"], "kv_stride_head": head, "kv_stride_batch": head * sizes["G"]}


COMPACT = Operator(
    name="KvcCompact",
    operation="kvc_compact",
    parameters=struct_of(operators.COMPACT),
    fields=(
        Field("prompt_budget", 1, MAX_TOKENS),
        Field("capacity", 1, MAX_TOKENS),
        Field("pool_kernel", 1, 4095),
        Field("page_size", 1, INT32_MAX),
    ),
    inputs=(
        Tensor("q_window", CACHE, ("B", "H", "W", "D")),
        Tensor("k", CACHE, ("B", "G", "S", "D")),
        Tensor("v", CACHE, ("B", "G", "S", "D")),
        Tensor("prompt_lengths", INT64, ("B",)),
    ),
    outputs=(
        Tensor("k_cache", CACHE, ("B", "G", "C", "D")),
        Tensor("v_cache", CACHE, ("B", "G", "C", "D")),
        Tensor("bounds", CACHE, ("B", "G", "2D", "P")),
        Tensor("cache_lengths", INT64, ("B",)),
        Tensor("indices", INT32, ("B", "G", "C")),
    ),
    check=_check,
    derive=_derive,
    extra=_strides,
)
