"""KvcHybridAttention: a decode step of a layer on a paged, compressed cache (plugins_cuda/include/kvc/attention.h)."""

from __future__ import annotations

from collections.abc import Mapping

from kvc_trt.backends.tensorrt.twins.sizes import Sizes, pages
from kvc_trt.backends.tensorrt.twins.tables import (
    CACHE,
    INT32,
    INT32_MAX,
    INT64,
    MAX_HEAD_SIZE,
    MAX_TOKENS,
    Field,
    Operator,
    Tensor,
)
from kvc_trt.kernels.structs import struct_of
from kvc_trt.operators import hybrid_attention as operators


def _check(fields: Mapping[str, int]) -> None:
    """Every limit that is left depends on sizes, which the C ABI judges."""


def _derive(fields: Mapping[str, int], sizes: Sizes) -> None:
    selected = max(fields[name] for name in ("top_k", "token_budget", "dense_until"))
    sizes.fix("K", selected, "fields top_k, token_budget, dense_until")
    if "D" in sizes:
        sizes.fix("2D", 2 * sizes["D"], "bounds")
    if "C" in sizes:
        sizes.fix("P", pages(sizes["C"], fields["page_size"]), "field page_size")


HYBRID_ATTENTION = Operator(
    name="KvcHybridAttention",
    operation="kvc_hybrid_attention",
    parameters=struct_of(operators.HYBRID_ATTENTION),
    fields=(
        Field("page_size", 1, INT32_MAX),
        Field("top_r", 1, MAX_HEAD_SIZE),
        Field("top_k", 1, MAX_TOKENS),
        Field("token_budget", 0, INT32_MAX),
        Field("dense_until", 0, INT32_MAX),
    ),
    inputs=(
        Tensor("query", CACHE, ("B", "H", "D")),
        Tensor("k_new", CACHE, ("B", "G", "D")),
        Tensor("v_new", CACHE, ("B", "G", "D")),
        Tensor("k_cache", CACHE, ("B", "G", "C", "D")),
        Tensor("v_cache", CACHE, ("B", "G", "C", "D")),
        Tensor("bounds", CACHE, ("B", "G", "2D", "P")),
        Tensor("cache_lengths", INT64, ("B",)),
    ),
    outputs=(
        Tensor("output", CACHE, ("B", "H", "D")),
        Tensor("k_cache_out", CACHE, ("B", "G", "C", "D"), alias=3),
        Tensor("v_cache_out", CACHE, ("B", "G", "C", "D"), alias=4),
        Tensor("bounds_out", CACHE, ("B", "G", "2D", "P"), alias=5),
        Tensor("selected", INT32, ("B", "G", "K")),
    ),
    check=_check,
    derive=_derive,
)
