"""KvcDenseAttention: one decode step of one layer that reads its whole cache (plugins_cuda/include/kvc/attention.h)."""

from __future__ import annotations

from collections.abc import Mapping

from kvc_trt.backends.tensorrt.twins.sizes import Sizes
from kvc_trt.backends.tensorrt.twins.tables import CACHE, INT32_MAX, INT64, Field, Operator, Tensor
from kvc_trt.kernels.structs import struct_of
from kvc_trt.operators import dense_attention as operators


def _check(fields: Mapping[str, int]) -> None:
    """One field, which has a range and nothing else."""


def _derive(fields: Mapping[str, int], sizes: Sizes) -> None:
    """Every size is one of a tensor."""


DENSE_ATTENTION = Operator(
    name="KvcDenseAttention",
    operation="kvc_dense_attention",
    parameters=struct_of(operators.DENSE_ATTENTION),
    # dense_until chooses between two ways to read the cache in the ONNX body; the kernel has one that serves both.
    fields=(Field("dense_until", 0, INT32_MAX),),
    inputs=(
        Tensor("query", CACHE, ("B", "H", "D")),
        Tensor("k_new", CACHE, ("B", "G", "D")),
        Tensor("v_new", CACHE, ("B", "G", "D")),
        Tensor("k_cache", CACHE, ("B", "G", "C", "D")),
        Tensor("v_cache", CACHE, ("B", "G", "C", "D")),
        Tensor("cache_lengths", INT64, ("B",)),
    ),
    outputs=(
        Tensor("output", CACHE, ("B", "H", "D")),
        Tensor("k_cache_out", CACHE, ("B", "G", "C", "D"), alias=3),
        Tensor("v_cache_out", CACHE, ("B", "G", "C", "D"), alias=4),
    ),
    check=_check,
    derive=_derive,
)
