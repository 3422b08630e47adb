"""The C ABI of the kernel libraries (plugins_cuda/include/kvc/), field by field as the headers declare it.

A test compiles the headers and compares every offset and size with these mirrors.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

ABI_VERSION = 1


class Status(IntEnum):
    """KvcStatus."""

    OK = 0
    INVALID_PARAMETER = 1
    WORKSPACE_TOO_SMALL = 2
    LAUNCH_FAILED = 3


class Dtype(IntEnum):
    """KvcDtype."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2


class Message(ctypes.Structure):
    """KvcMessage: one line about a refusal."""

    _fields_ = (("text", ctypes.c_char * 256),)


class Parameters(ctypes.Structure):
    """Base of the parameter structs: fills their first field, their own size, which tells the library the layout."""

    def __init__(self, **fields: int | None) -> None:
        super().__init__(struct_bytes=ctypes.sizeof(type(self)), **fields)


class CompactParams(Parameters):
    """KvcCompactParams."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("pool_kernel", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("prompt_length", ctypes.c_int64),
        ("prompt_budget", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("kv_stride_batch", ctypes.c_int64),
        ("kv_stride_head", ctypes.c_int64),
        ("kv_stride_token", ctypes.c_int64),
        ("q_window", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("prompt_lengths", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("cache_lengths", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
    )


class HybridAttentionParams(Parameters):
    """KvcHybridAttentionParams."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("top_r", ctypes.c_int32),
        ("capacity", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("token_budget", ctypes.c_int64),
        ("dense_until", ctypes.c_int64),
        ("selected_width", ctypes.c_int64),
        ("query", ctypes.c_void_p),
        ("k_new", ctypes.c_void_p),
        ("v_new", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("cache_lengths", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("selected", ctypes.c_void_p),
    )


class DenseAttentionParams(Parameters):
    """KvcDenseAttentionParams."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("capacity", ctypes.c_int64),
        ("query", ctypes.c_void_p),
        ("k_new", ctypes.c_void_p),
        ("v_new", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("cache_lengths", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
    )
