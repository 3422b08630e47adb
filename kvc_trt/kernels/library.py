"""The kernels called with torch tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from kvc_trt.kernels import checks
from kvc_trt.kernels.c_library import EXECUTORS, SCHEDULES, CLibrary
from kvc_trt.kernels.results import CompactResult, compact_shapes
from kvc_trt.kernels.structs import CompactParams, DenseAttentionParams, HybridAttentionParams, Parameters

__all__ = ["EXECUTORS", "SCHEDULES", "CompactResult", "KernelLibrary", "compact_shapes"]

_MOST_SLOTS, _INT32, _INT64 = 2**20, 2**31 - 1, 2**63 - 1


class KernelLibrary(CLibrary):
    """A library called with torch tensors, which are checked before their addresses are handed on."""

    def compact(
        self, q_window: Tensor, k: Tensor, v: Tensor, prompt_lengths: Tensor, *, prompt_budget: int, capacity: int,
        pool_kernel: int, page_size: int, out: CompactResult | None = None,
    ) -> CompactResult:  # fmt: skip
        """Keep `prompt_budget` tokens per KV head of every prompt longer than that, and the bounds of their pages.

        q_window [B,H,W,D]; k, v [B,G,S,D] with equal strides and contiguous heads; prompt_lengths int64 [B]. `out`
        takes the results into the caller's tensors; with k and v themselves as out.k_cache and out.v_cache (then
        capacity = S and both are contiguous) the cache is compacted in place. Raises ValueError for a tensor that does
        not fit, KernelError for what the library refuses.
        """
        batch, heads, window, size = checks.dimensions("q_window", q_window, "[B,H,W,D]")
        _, kv_heads, length, _ = checks.dimensions("k", k, "[B,G,S,D]")
        dtype, device = checks.float_type("q_window", q_window), self._device(q_window)
        checks.like("q_window", q_window, (batch, heads, window, size), q_window.dtype, device)
        checks.like("prompt_lengths", prompt_lengths, (batch,), torch.int64, device)
        strides = checks.kv_strides(q_window, k, v)
        checks.whole("capacity", capacity, 1, _MOST_SLOTS)
        checks.whole("page_size", page_size, 1, _INT32)
        checks.whole("prompt_budget", prompt_budget, 1, _INT64)
        checks.whole("pool_kernel", pool_kernel, 1, _INT32)
        shapes = compact_shapes(batch, kv_heads, size, capacity, page_size)
        result = out
        if result is None:
            result = CompactResult(*(torch.empty(s, dtype=t or k.dtype, device=device) for s, t in shapes))
        for name, value, (shape, kind) in zip(CompactResult._fields, result, shapes, strict=True):
            checks.like(name, value, shape, kind or k.dtype, device)
        in_place = result.k_cache.data_ptr() == k.data_ptr() and result.v_cache.data_ptr() == v.data_ptr()
        inputs = {"q_window": q_window, "prompt_lengths": prompt_lengths, **({} if in_place else {"k": k, "v": v})}
        checks.separate(result._asdict(), inputs)
        params = CompactParams(
            dtype=dtype, batch=batch, heads=heads, kv_heads=kv_heads, head_size=size, window=window,
            pool_kernel=pool_kernel, page_size=page_size, prompt_length=length, prompt_budget=prompt_budget,
            capacity=capacity, kv_stride_batch=strides[0], kv_stride_head=strides[1], kv_stride_token=strides[2],
            q_window=q_window.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), prompt_lengths=prompt_lengths.data_ptr(),
            **_addresses(result._asdict()),
        )  # fmt: skip
        self.run("kvc_compact", params, device)
        return result

    def hybrid_attention(
        self, query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, bounds: Tensor,
        cache_lengths: Tensor, *, page_size: int, top_r: int, top_k: int, token_budget: int, dense_until: int,
        with_selected: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Append one token per row, choose what to read, attend: output [B,H,D] and selected int32 [B,G,width].

        query [B,H,D]; k_new, v_new [B,G,D]; cache_lengths int64 [B], before the append. k_cache, v_cache [B,G,C,D] and
        bounds [B,G,2D,P] are updated in place. A row whose length is outside 0..C-1 is inactive: zeros, and -1.
        """
        sizes = self._step(query, k_new, v_new, k_cache, v_cache, cache_lengths)
        checks.whole("page_size", page_size, 1, _INT32)
        checks.whole("top_r", top_r, 1, _INT32)
        for name, value in (("top_k", top_k), ("token_budget", token_budget), ("dense_until", dense_until)):
            checks.whole(name, value, 0, _INT32)
        pages = -(-sizes["capacity"] // page_size)
        shape = (sizes["batch"], sizes["kv_heads"], 2 * sizes["head_size"], pages)
        checks.like("bounds", bounds, shape, query.dtype, query.device)
        width = max(top_k, token_budget, dense_until)
        output, selected = torch.empty_like(query), None
        if with_selected:
            selected = torch.empty((*shape[:2], width), dtype=torch.int32, device=query.device)
        read = {"query": query, "k_new": k_new, "v_new": v_new, "cache_lengths": cache_lengths}
        written = {"k_cache": k_cache, "v_cache": v_cache, "bounds": bounds, "output": output}
        checks.separate(written, read)
        addresses = {"selected": None if selected is None else selected.data_ptr(), **_addresses(read | written)}
        params = HybridAttentionParams(
            **sizes, page_size=page_size, top_r=top_r, top_k=top_k, token_budget=token_budget, dense_until=dense_until,
            selected_width=width, **addresses,
        )  # fmt: skip
        self.run("kvc_hybrid_attention", params, query.device)
        return output, selected

    def dense_attention(
        self, query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor
    ) -> Tensor:
        """Append one token per row and attend to all entries: `hybrid_attention` without pages."""
        sizes = self._step(query, k_new, v_new, k_cache, v_cache, cache_lengths)
        output = torch.empty_like(query)
        read = {"query": query, "k_new": k_new, "v_new": v_new, "cache_lengths": cache_lengths}
        written = {"k_cache": k_cache, "v_cache": v_cache, "output": output}
        checks.separate(written, read)
        self.run("kvc_dense_attention", DenseAttentionParams(**sizes, **_addresses(read | written)), query.device)
        return output

    def run(self, operation: str, params: Parameters, device: torch.device) -> None:
        """Call with a workspace from torch, on the device's current stream. The struct's pointers are not checked."""
        workspace = torch.empty(self.workspace_bytes(operation, params), dtype=torch.uint8, device=device)
        with _current(device) as stream:
            self.call(operation, params, workspace.data_ptr(), workspace.numel(), stream)

    def _step(
        self, query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor
    ) -> dict[str, int]:
        batch, heads, size = checks.dimensions("query", query, "[B,H,D]")
        _, kv_heads, capacity, _ = checks.dimensions("k_cache", k_cache, "[B,G,C,D]")
        dtype, device = checks.float_type("query", query), self._device(query)
        new, cache = (batch, kv_heads, size), (batch, kv_heads, capacity, size)
        wanted = (
            ("query", query, (batch, heads, size)), ("k_new", k_new, new), ("v_new", v_new, new),
            ("k_cache", k_cache, cache), ("v_cache", v_cache, cache),
        )  # fmt: skip
        for name, value, shape in wanted:
            checks.like(name, value, shape, query.dtype, device)
        checks.like("cache_lengths", cache_lengths, (batch,), torch.int64, device)
        return {
            "dtype": dtype, "batch": batch, "heads": heads, "kv_heads": kv_heads, "head_size": size,
            "capacity": capacity,
        }  # fmt: skip

    def _device(self, value: Tensor) -> torch.device:
        if value.device.type != self.device_type:
            raise ValueError(f"tensors are on {value.device}; {self.path} ({self.executor}) takes {self.device_type}")
        return value.device


def _addresses(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in tensors.items()}


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[int | None]:
    """Make `device` current and give its stream; the emulation has neither."""
    if device.type != "cuda":
        yield None
        return
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream
