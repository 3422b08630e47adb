"""The calls that the sweep times: our kernels on synthetic caches, and other libraries' attention over the dense cache.

Each maker returns one call per set of tensors; gpu_timing rotates over the sets.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.timing import Call
from benchmarks.kernels.cases import HEAD_SIZE, MODEL, Case
from kvc_trt.kernels.library import CompactResult, KernelLibrary, empty_outputs
from kvc_trt.kernels.ops import numbers_of
from kvc_trt.kernels.stored_parts import parts_of
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.dimensions import stored_pages
from kvc_trt.operators.schema import CACHE_FORMAT, part_names, vector_of
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.reference.bounds import fp8_codes

Maker = Callable[[KernelLibrary, Case, int], list[Call]]


def compact(library: KernelLibrary, case: Case, sets: int) -> list[Call]:
    """Return the compaction of one layer's prompt, out of place."""
    parameters = case.parameters
    device = library.device_type
    lengths = torch.full((case.batch,), case.prompt, device=device)
    numbers = numbers_of(COMPACT, parameters)

    def call() -> Call:
        queries = _random(device, case, case.batch, case.heads, parameters.window, HEAD_SIZE)
        keys, values = (_random(device, case, case.batch, case.kv_heads, case.prompt, HEAD_SIZE) for _ in range(2))
        inputs = {"q_window": queries, "k": keys, "v": values, "prompt_lengths": lengths}
        out = CompactResult(**empty_outputs(COMPACT, {**inputs, **numbers}))
        return lambda: library.compact(queries, keys, values, lengths, **numbers, out=out)

    return [call() for _ in range(sets)]


def product(device: torch.device, case: Case, *, narrow: bool = False) -> Call:
    """Return the largest product of a layer, gate and up, for a step's rows; `narrow` where nothing is measured."""
    inner, width = (64, 32) if narrow else (2 * MODEL.intermediate_size, MODEL.hidden_size)
    dtype = torch.bfloat16
    matrix, rows = (torch.zeros(size, width, dtype=dtype, device=device) for size in (inner, case.batch))
    return lambda: rows @ matrix.T


def hybrid(library: KernelLibrary, case: Case, sets: int) -> list[Call]:
    """One decode step over the compressed cache: append, select, attend."""
    parameters = case.parameters
    numbers = numbers_of(HYBRID_ATTENTION, parameters)
    lengths = torch.full((case.batch,), case.entries - 1, device=library.device_type)

    def call() -> Call:
        query, new, keys, values = _step(library.device_type, case, parameters.capacity)
        bounds = page_bounds(keys, case.entries, parameters.page_size, fp8=parameters.fp8_bounds)
        step = _arguments(case, query, new, keys, values, lengths) | {"bounds": bounds} | numbers
        return lambda: library.compute(HYBRID_ATTENTION, step, without=("selected",))

    return [call() for _ in range(sets)]


def dense(library: KernelLibrary, case: Case, sets: int) -> list[Call]:
    """One decode step over the uncompressed cache with our kernel."""
    lengths = torch.full((case.batch,), case.dense_entries - 1, device=library.device_type)

    def call() -> Call:
        step = _arguments(case, *_step(library.device_type, case, case.context), lengths)
        return lambda: library.compute(DENSE_ATTENTION, step)

    return [call() for _ in range(sets)]


def sdpa_flash(library: KernelLibrary, case: Case, sets: int) -> list[Call]:
    """PyTorch's scaled_dot_product_attention on its flash kernel, without the append."""

    def call() -> Call:
        query, _, keys, values = _step(library.device_type, case, case.dense_entries)

        def run() -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return scaled_dot_product_attention(query.unsqueeze(2), keys, values, enable_gqa=True)

        return run

    return [call() for _ in range(sets)]


def flashinfer(_: KernelLibrary, case: Case, sets: int) -> list[Call]:
    """FlashInfer's batch decode over pages of 16 tokens, on tensor cores, without the append."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    page, pages = 16, -(-case.dense_entries // 16)
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * pages
    indices = torch.arange(case.batch * pages, dtype=torch.int32, device="cuda")
    last = torch.full((case.batch,), case.dense_entries - (pages - 1) * page, dtype=torch.int32, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "HND", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=starts.clone(), paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )  # fmt: skip
    kind = getattr(torch, case.dtype)
    wrapper.plan(
        starts, indices, last, case.heads, case.kv_heads, HEAD_SIZE, page, q_data_type=kind, kv_data_type=kind,
        sm_scale=1 / math.sqrt(HEAD_SIZE),
    )  # fmt: skip

    def call() -> Call:
        query = _random("cuda", case, case.batch, case.heads, HEAD_SIZE)
        cache = tuple(_random("cuda", case, case.batch * pages, case.kv_heads, page, HEAD_SIZE) for _ in range(2))
        return lambda: wrapper.run(query, cache)

    return [call() for _ in range(sets)]


BASELINES: dict[str, Maker] = {"sdpa_flash": sdpa_flash, "flashinfer": flashinfer}
KERNELS: dict[str, Maker] = {"compact": compact, "hybrid": hybrid, "dense": dense}


def unavailable(name: str) -> str | None:
    """Return the reason why a baseline cannot be run here; None if it can."""
    if name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    return None


def page_bounds(keys: Tensor, entries: int, page_size: int, *, fp8: bool) -> Tensor:
    """Bounds [B,G,2D,P] of the first `entries` slots of keys [B,G,C,D]: maxima of K, then of -K; empty pages lowest.

    With `fp8`, as the bytes that a cache keeps."""
    batch, heads, capacity, size = keys.shape
    pages = stored_pages(capacity, page_size, keys.element_size(), fp8)
    lowest = torch.finfo(keys.dtype).min
    both = torch.full((batch, heads, pages * page_size, 2 * size), lowest, dtype=keys.dtype, device=keys.device)
    both[:, :, :entries, :size] = keys[:, :, :entries]
    both[:, :, :entries, size:] = -keys[:, :, :entries]
    maxima = both.view(batch, heads, pages, page_size, 2 * size).amax(3).transpose(2, 3).contiguous()
    return fp8_codes(maxima) if fp8 else maxima


def _arguments(
    case: Case, query: Tensor, new: Tensor, keys: Tensor, values: Tensor, lengths: Tensor
) -> dict[str, Tensor | int]:
    """Return the arguments of all steps by name; keys and values [B,G,C,D] as the case's cache stores them."""
    given = {"query": query, "k_new": new, "v_new": new, "cache_lengths": lengths}
    for tensor, table in ((K_CACHE, keys), (V_CACHE, values)):
        vector = vector_of(tensor, case.cache_format)
        given |= zip(part_names(tensor, vector), parts_of(table, vector), strict=True)
    return given | {CACHE_FORMAT.name: case.cache_format.code}


def _step(device: str, case: Case, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, new = (_random(device, case, case.batch, heads, HEAD_SIZE) for heads in (case.heads, case.kv_heads))
    keys, values = (_random(device, case, case.batch, case.kv_heads, capacity, HEAD_SIZE) for _ in range(2))
    return query, new, keys, values


def _random(device: str, case: Case, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=getattr(torch, case.dtype), device=device)
