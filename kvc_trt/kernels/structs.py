"""The C ABI of the kernel libraries (plugins_cuda/include/kvc/): enumerations, message and parameter structs.

A test compiles the headers and compares every offset, size and number with these mirrors.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache

from kvc_trt.kernels.parameters import kernel_of, members
from kvc_trt.operators.schema import Operator

ABI_VERSION = 5


class Status(IntEnum):
    """KvcStatus: the result of a call."""

    OK = 0
    INVALID_PARAMETER = 1
    WORKSPACE_TOO_SMALL = 2
    LAUNCH_FAILED = 3


class Dtype(IntEnum):
    """KvcDtype: the element type of the cache."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2

    @property
    def bytes(self) -> int:
        """Size of an element."""
        return 4 if self is Dtype.FLOAT32 else 2


class Message(ctypes.Structure):
    """KvcMessage: one line about a refusal."""

    _fields_ = (("text", ctypes.c_char * 256),)


class EmulatedLaunch(ctypes.Structure):
    """KvcEmulationLaunch: one kernel launch of the emulation."""

    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("static_shared_bytes", ctypes.c_uint64),
        ("dynamic_shared_bytes", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
        ("registers", ctypes.c_uint32),
        ("begins_early", ctypes.c_uint32),
        ("products", ctypes.c_uint64),
        ("exchanges", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("cluster_barriers", ctypes.c_uint64),
        ("cluster_blocks", ctypes.c_uint64),
        ("prefers_shared_memory", ctypes.c_uint64),
    )


class EmulatedExecutions(ctypes.Structure):
    """KvcEmulationExecutions: a straight piece of a kernel, and how often the warps of a launch ran it."""

    _fields_ = (
        ("kernel", ctypes.c_char * 64),
        ("address", ctypes.c_uint64),
        ("warps", ctypes.c_uint64),
        ("longest", ctypes.c_uint64),
        ("lanes", ctypes.c_uint64),
    )


class Parameters(ctypes.Structure):
    """Base of the parameter structs; sets their first field to their size, which tells the library the layout."""

    def __init__(self, **fields: int | None) -> None:
        super().__init__(struct_bytes=ctypes.sizeof(type(self)), **fields)


class PrefetchParameters(Parameters):
    """KvcPrefetchParams."""

    _fields_ = (("struct_bytes", ctypes.c_uint64), ("bytes", ctypes.c_int64), ("first", ctypes.c_void_p))


_C_TYPES = {"uint64_t": ctypes.c_uint64, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32}


@cache
def struct_of(operator: Operator) -> type[Parameters]:
    """Return the parameter struct of the operation that computes an operator."""
    fields = tuple((member.name, _C_TYPES.get(member.type, ctypes.c_void_p)) for member in members(operator))
    name = kernel_of(operator).struct
    return type(name, (Parameters,), {"_fields_": fields, "__doc__": f"{name}."})
