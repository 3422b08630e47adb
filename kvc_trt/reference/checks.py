"""Argument checks of the reference functions; errors name the tensor, its shape and what was expected."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT_TYPES = (torch.float32, torch.float64)


def tensor(name: str, value: Tensor, expected: str, *sizes: int | None, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless `value` has these sizes (None: any) and is float32 or float64, or exactly `dtype`."""
    right = value.ndim == len(sizes) and all(w is None or w == s for w, s in zip(sizes, value.shape, strict=True))
    if not right:
        raise ValueError(f"{name} has shape {list(value.shape)}; expected {expected}")
    if value.dtype not in (FLOAT_TYPES if dtype is None else (dtype,)):
        wanted = dtype or "torch.float32 or torch.float64"
        raise ValueError(f"{name} {list(value.shape)} is {value.dtype}; expected {wanted}")


def group_size(query_heads: int, kv_heads: int, name: str, shape: torch.Size) -> int:
    """Return the number of query heads per KV head; ValueError if it is not a whole number."""
    if kv_heads < 1 or query_heads % kv_heads:
        expected = f"a multiple of {kv_heads} KV heads"
        raise ValueError(f"{name} has shape {list(shape)}: {query_heads} query heads; expected {expected}")
    return query_heads // kv_heads


def lengths(name: str, value: Tensor, batch: int, low: int, high: int) -> list[int]:
    """Return the row lengths as integers; ValueError unless there is one per row, each in low..high."""
    if value.ndim != 1 or value.shape[0] != batch or value.is_floating_point():
        raise ValueError(f"{name} has shape {list(value.shape)} ({value.dtype}); expected [B={batch}] integers")
    numbers = [int(n) for n in value]
    if any(n < low or n > high for n in numbers):
        raise ValueError(f"{name} has shape {list(value.shape)} with values {numbers}; expected each in {low}..{high}")
    return numbers


def number(name: str, value: int, low: int, high: int | None = None, *, odd: bool = False) -> None:
    """Raise ValueError unless `value` is in low..high and, with `odd`, is odd."""
    if value < low or (high is not None and value > high) or (odd and value % 2 == 0):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} is {value}; expected {'an odd number ' if odd else ''}{limit}")


def per_row(name: str, value: int | Tensor, batch: int) -> list[int]:
    """Return one integer per row: `value` for all of them, or its own elements; ValueError unless these are [B]."""
    if isinstance(value, Tensor):
        if value.shape != (batch,) or value.is_floating_point():
            raise ValueError(f"{name} has shape {list(value.shape)} ({value.dtype}); expected [B={batch}] integers")
        return [int(number) for number in value]
    return [value] * batch
