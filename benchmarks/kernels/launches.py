"""The kernels that one call launches, with their sizes. The emulated library records them: it runs the same launchers.

Grids are functions of sizes alone, so no kernel runs, and the tensors are never touched.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.cases import HEAD_SIZE, Case
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.ops import numbers_of
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.dimensions import groups_of
from kvc_trt.operators.schema import CACHE_FORMAT, FLOAT16, INT8, parts_of
from kvc_trt.operators.tensors import K_CACHE, V_CACHE


@dataclass(frozen=True)
class Launch:
    """One launch of one call."""

    kernel: str
    ctas: int
    threads: int
    dynamic_shared: int
    begins_early: bool = False
    """True if the launch may begin before the one ahead of it has ended (programmatic dependent launch)."""


def record(library: KernelLibrary, operation: str, case: Case) -> list[Launch]:
    """Launches of one call of `compact`, `hybrid` or `dense` on the case's sizes."""
    calls = {"compact": _compact, "hybrid": _hybrid, "dense": _dense}
    return [
        Launch(
            entry.name.decode(),
            _product(entry.grid),
            _product(entry.block),
            entry.dynamic_shared_bytes,
            bool(entry.begins_early),
        )
        for entry in library.checked_launches_of(lambda: calls[operation](library, case))
    ]


def emulation(build: Path) -> KernelLibrary:
    return KernelLibrary(build / "libkvc_emulation.so")


def _compact(library: KernelLibrary, case: Case) -> None:
    parameters = case.parameters
    numbers: dict[str, Any] = numbers_of(COMPACT, parameters)
    keys = _empty(case, case.batch, case.kv_heads, case.prompt, HEAD_SIZE)
    library.compact(
        _empty(case, case.batch, case.heads, parameters.window, HEAD_SIZE), keys, torch.empty_like(keys),
        torch.zeros(case.batch, dtype=torch.int64), **numbers,
    )  # fmt: skip


def _hybrid(library: KernelLibrary, case: Case) -> None:
    parameters = case.parameters
    bounds = _empty(case, case.batch, case.kv_heads, 2 * HEAD_SIZE, parameters.stored_pages(case.dtype))
    if parameters.fp8_bounds:
        bounds = torch.empty_like(bounds, dtype=torch.int8)
    step = _step(case, parameters.capacity) | {"bounds": bounds} | numbers_of(HYBRID_ATTENTION, parameters)
    library.compute(HYBRID_ATTENTION, step)


def _dense(library: KernelLibrary, case: Case) -> None:
    library.compute(DENSE_ATTENTION, _step(case, case.context))


def _step(case: Case, capacity: int) -> dict[str, torch.Tensor | int]:
    """Return the arguments of all steps by name: query, new token, cache and lengths."""
    new = _empty(case, case.batch, case.kv_heads, HEAD_SIZE)
    lasts = {"D": HEAD_SIZE, "D/2": HEAD_SIZE // 2, "groups": groups_of(HEAD_SIZE), "1": 1}
    types = {INT8: torch.int8, FLOAT16: torch.float16}
    cache = {
        part.name: torch.empty(
            (case.batch, case.kv_heads, capacity, lasts[part.shape[-1]]),
            dtype=types.get(part.element, getattr(torch, case.dtype)),
        )
        for tensor in (K_CACHE, V_CACHE)
        for part in parts_of(tensor, case.cache_format)
    }
    return {
        "query": _empty(case, case.batch, case.heads, HEAD_SIZE),
        "k_new": new,
        "v_new": torch.empty_like(new),
        **cache,
        "cache_lengths": torch.zeros(case.batch, dtype=torch.int64),
        CACHE_FORMAT.name: case.cache_format.code,
    }


def _empty(case: Case, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, case.dtype))


def _product(sizes: ctypes.Array[ctypes.c_uint32]) -> int:
    x, y, z = sizes
    return int(x * y * z)
