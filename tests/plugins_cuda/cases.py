"""Inputs for the kernels; `checks.py` compares the kernels' results with the reference.

Two kinds of inputs: random ones, and dyadic ones made of few distinct keys, whose scores tie exactly in any order of
summation. Slots past a row's end hold NaN, so that any read of them shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.reference import page_bounds

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["own", "fp8"])
"""Bounds of the cache's own type, and in fp8."""


class _Case:
    def to(self, device: str | torch.device) -> Any:
        """Return a copy of the case with every tensor on `device`, so that the original does not change."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device, copy=True) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class CompactCase(_Case):
    """Arguments of kvc_compact."""

    q_window: Tensor
    k: Tensor
    v: Tensor
    prompt_lengths: Tensor
    prompt_budget: int
    capacity: int
    pool_kernel: int
    page_size: int
    fp8_bounds: int = 0

    def arguments(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class StepCase(_Case):
    """Arguments of kvc_hybrid_attention; the first six tensors without `bounds` are those of kvc_dense_attention."""

    query: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    bounds: Tensor
    cache_lengths: Tensor
    page_size: int
    top_r: int
    top_k: int
    token_budget: int
    dense_until: int
    fp8_bounds: int = 0
    recent: int = 0

    def arguments(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def dense_arguments(self) -> dict[str, Tensor]:
        names = ("query", "k_new", "v_new", "k_cache", "v_cache", "cache_lengths")
        return {name: getattr(self, name) for name in names}

    @property
    def limit(self) -> int:
        return max(self.token_budget, self.dense_until)


def compact_case(
    *, lengths: Sequence[int], heads: int = 4, kv_heads: int = 2, size: int = 32, window: int = 8,
    length: int | None = None, budget: int = 24, capacity: int | None = None, pool: int = 5, page: int = 4,
    dtype: torch.dtype = torch.float32, seed: int = 0, ties: bool = False, distinct: int = 5, fp8: bool = False,
) -> CompactCase:  # fmt: skip
    """Return a prompt batch with rows of `lengths`; `ties` draws the keys from `distinct` dyadic vectors."""
    make = torch.Generator().manual_seed(seed)
    longest = max(max(lengths), 1) if length is None else length
    shape = (len(lengths), kv_heads, longest, size)
    if ties:
        q_window = dyadic((len(lengths), heads, window, size), make)
        k = dyadic((*shape[:2], distinct, size), make).gather(2, _draw(distinct, shape, make))
    else:
        q_window = torch.randn((len(lengths), heads, window, size), generator=make)
        k = torch.randn(shape, generator=make)
    v = torch.randn(shape, generator=make)
    for row, n in enumerate(lengths):
        k[row, :, n:], v[row, :, n:] = math.nan, math.nan
    slots = max(budget, min(longest, budget)) + 3 if capacity is None else capacity
    numbers = torch.tensor(lengths, dtype=torch.int64)
    prompt = q_window.to(dtype), k.to(dtype), v.to(dtype), numbers
    return CompactCase(*prompt, budget, slots, pool, page, int(fp8))


def step_case(
    *, lengths: Sequence[int], heads: int = 4, kv_heads: int = 2, size: int = 32, capacity: int | None = None,
    page: int = 4, top_r: int = 8, top_k: int = 16, token_budget: int = 16, dense_until: int | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, ties: bool = False, distinct: int = 3, opposite: bool = False,
    fp8: bool = False, recent: int = 0,
) -> StepCase:  # fmt: skip
    """One decode step over rows that store `lengths` tokens before it (a negative one, or C, is an inactive row).

    `ties` repeats `distinct` dyadic pages, `opposite` makes heads 2i and 2i+1 of a group cancel each other.
    """
    make = torch.Generator().manual_seed(seed)
    slots = max(*lengths, 1) + 5 if capacity is None else capacity
    batch, shape = len(lengths), (len(lengths), kv_heads, slots, size)
    draw = dyadic if ties else _normal
    query, k_new = draw((batch, heads, size), make), draw((batch, kv_heads, size), make)
    if opposite:
        query[:, 1::2] = -query[:, : heads - heads % 2 : 2]
    k_cache = draw(shape, make)
    if ties:
        pages = dyadic((*shape[:2], distinct, page * size), make)
        drawn = pages.gather(2, _draw(distinct, (*shape[:2], -(-slots // page), page * size), make))
        k_cache = drawn.reshape(*shape[:2], -1, size)[:, :, :slots].clone()
    v_cache, v_new = _normal(shape, make), _normal((batch, kv_heads, size), make)
    numbers = torch.tensor(lengths, dtype=torch.int64)
    stored = torch.where((numbers < 0) | (numbers >= slots), 0, numbers)
    for row, n in enumerate(stored.tolist()):
        k_cache[row, :, n:], v_cache[row, :, n:] = math.nan, math.nan
    query, k_new, v_new, k_cache, v_cache = (t.to(dtype) for t in (query, k_new, v_new, k_cache, v_cache))
    until = token_budget if dense_until is None else dense_until
    return StepCase(
        query, k_new, v_new, k_cache, v_cache, bounds_of(k_cache, stored, page, fp8=fp8), numbers, page, top_r,
        min(top_k, slots), token_budget, until, int(fp8), min(recent, top_k, slots),
    )  # fmt: skip


def bounds_of(keys: Tensor, lengths: Tensor, page: int, *, fp8: bool | int = False) -> Tensor:
    """Return the bounds [B,G,2D,P] of a cache [B,G,C,D], of its type or fp8."""
    extremes = page_bounds(keys.float(), lengths, page, fp8=bool(fp8))
    return reference_ops.channel_major(*extremes, keys.dtype, fp8=bool(fp8))


def with_key(case: StepCase, slots: int | slice, channel: int, value: float) -> StepCase:
    """Return the case with one channel of some keys replaced in the KV heads of row 0, and its bounds."""
    keys = case.k_cache.clone()
    keys[0, :, slots, channel] = value
    bounds = bounds_of(keys, case.cache_lengths, case.page_size, fp8=case.fp8_bounds)
    return replace(case, k_cache=keys, bounds=bounds)


def without_pages(case: StepCase, pages: int) -> StepCase:
    """Return the case, of fp32, in which the first pages of row 0 score minus infinity in every head.

    Their keys are so low on channel 0, which every query chooses and rates 4, that the product overflows.
    """
    case.query[:, :, 0] = 4.0
    return with_key(case, slice(pages * case.page_size), 0, torch.finfo(torch.float32).min)


def dyadic(shape: tuple[int, ...], make: torch.Generator) -> Tensor:
    """Multiples of 1/2 in -2..2: their products and sums are exact in every type and order."""
    return torch.randint(-4, 5, shape, generator=make).float() / 2


def _normal(shape: tuple[int, ...], make: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=make)


def _draw(distinct: int, shape: tuple[int, ...], make: torch.Generator) -> Tensor:
    """Indices into axis 2 for `gather`: one draw per entry, the same for its whole row."""
    return torch.randint(distinct, (*shape[:3], 1), generator=make).expand(*shape)
