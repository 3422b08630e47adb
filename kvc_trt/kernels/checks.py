"""Tensors are checked before their addresses leave Python: behind the C ABI a wrong shape is a wild read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvc_trt.kernels.structs import Dtype

DTYPES = {torch.float32: Dtype.FLOAT32, torch.float16: Dtype.FLOAT16, torch.bfloat16: Dtype.BFLOAT16}


def dimensions(name: str, value: Tensor, layout: str) -> torch.Size:
    """The tensor's shape; ValueError unless it has as many dimensions as `layout` ("[B,H,D]") names."""
    if value.ndim != layout.count(",") + 1:
        raise ValueError(f"{name} has shape {list(value.shape)}; expected {layout}")
    if value.numel() == 0:
        raise ValueError(f"{name} has shape {list(value.shape)}; expected {layout} without an empty dimension")
    return value.shape


def float_type(name: str, value: Tensor) -> Dtype:
    """The element type in the ABI's terms; ValueError for one that the kernels do not have."""
    if value.dtype not in DTYPES:
        raise ValueError(f"{name} is {value.dtype}; expected one of {', '.join(map(str, DTYPES))}")
    return DTYPES[value.dtype]


def like(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless `value` is a contiguous tensor of exactly this shape, type and device."""
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {list(value.shape)}; expected {list(shape)}")
    if value.dtype != dtype:
        raise ValueError(f"{name} {list(value.shape)} is {value.dtype}; expected {dtype}")
    on_device(name, value, device)
    if not value.is_contiguous():
        raise ValueError(f"{name} {list(value.shape)} has strides {list(value.stride())}; expected it contiguous")


def on_device(name: str, value: Tensor, device: torch.device) -> None:
    """Raise ValueError unless `value` has memory of its own on `device`."""
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; expected {device}")
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        raise ValueError(f"{name} is not an ordinary strided tensor")


def separate(written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor that is written shares memory with another one."""
    spans = {name: _span(value) for name, value in {**read, **written}.items()}
    for name in written:
        for other, (start, end) in spans.items():
            if other != name and spans[name][0] < end and start < spans[name][1]:
                raise ValueError(f"{name} and {other} overlap in memory; expected separate tensors")


def kv_strides(q_window: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and token, which k and v must share."""
    batch, _, _, size = q_window.shape
    for name, value in (("k", k), ("v", v)):
        if value.ndim != 4 or value.shape != k.shape or (value.shape[0], value.shape[3]) != (batch, size):
            raise ValueError(f"{name} has shape {list(value.shape)}; expected {[batch, 'G', 'S', size]}, k as v")
        if value.dtype != q_window.dtype:
            raise ValueError(f"{name} is {value.dtype}; expected {q_window.dtype} like q_window")
        on_device(name, value, q_window.device)
    if k.stride() != v.stride() or k.stride(3) != 1:
        found = f"strides {list(k.stride())} and {list(v.stride())}"
        raise ValueError(f"k and v have {found}; expected equal ones with contiguous heads")
    return k.stride(0), k.stride(1), k.stride(2)


def whole(name: str, value: int, low: int, high: int) -> None:
    """Raise ValueError unless `value` lies in low..high: ctypes would cut a larger one without a word."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; expected it in {low}..{high}")


def _span(value: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one behind the last."""
    steps = zip(value.shape, value.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return value.data_ptr(), value.data_ptr() + elements * value.element_size()
