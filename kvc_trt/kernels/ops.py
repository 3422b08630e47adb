"""`torch.ops.kvc`: compaction and decode attention as PyTorch operators. Importing this module registers them.

On CUDA tensors they call the CUDA library, on CPU tensors the emulated library if one was chosen (KVC_TRT_KERNELS,
`kvc_trt.kernels.use_library`), else the reference. Shapes of the results depend on shapes and numbers alone, so they
trace under `torch.compile` and replay in a CUDA graph. No operator has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.errors import KernelLibraryError
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.loading import VARIABLE, current_library
from kvc_trt.kernels.results import compact_shapes

SCHEMAS = (
    "compact(Tensor q_window, Tensor k, Tensor v, Tensor prompt_lengths, int prompt_budget, int capacity,"
    " int pool_kernel, int page_size)"
    " -> (Tensor k_cache, Tensor v_cache, Tensor bounds, Tensor cache_lengths, Tensor indices)",
    "hybrid_attention(Tensor query, Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor(c!) bounds, Tensor cache_lengths, int page_size, int top_r, int top_k, int token_budget, int dense_until)"
    " -> (Tensor output, Tensor selected)",
    "dense_attention(Tensor query, Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor cache_lengths) -> Tensor",
)


def _compact(
    q_window: Tensor, k: Tensor, v: Tensor, prompt_lengths: Tensor, prompt_budget: int, capacity: int,
    pool_kernel: int, page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = q_window.contiguous(), k, v, prompt_lengths.contiguous()
    library = _library_for(q_window)
    if library is None:
        return reference_ops.compact(*inputs, prompt_budget, capacity, pool_kernel, page_size)
    return library.compact(
        *inputs, prompt_budget=prompt_budget, capacity=capacity, pool_kernel=pool_kernel, page_size=page_size
    )


def _hybrid_attention(
    query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, bounds: Tensor,
    cache_lengths: Tensor, page_size: int, top_r: int, top_k: int, token_budget: int, dense_until: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    new = query.contiguous(), k_new.contiguous(), v_new.contiguous()
    state = k_cache, v_cache, bounds, cache_lengths.contiguous()
    library = _library_for(query)
    if library is None:
        return reference_ops.hybrid_attention(*new, *state, page_size, top_r, top_k, token_budget, dense_until)
    output, selected = library.hybrid_attention(
        *new, *state, page_size=page_size, top_r=top_r, top_k=top_k, token_budget=token_budget, dense_until=dense_until
    )
    assert selected is not None
    return output, selected


def _dense_attention(
    query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor
) -> Tensor:
    inputs = query.contiguous(), k_new.contiguous(), v_new.contiguous(), k_cache, v_cache, cache_lengths.contiguous()
    library = _library_for(query)
    return reference_ops.dense_attention(*inputs) if library is None else library.dense_attention(*inputs)


def _library_for(value: Tensor) -> KernelLibrary | None:
    """The library that takes this tensor; None for the reference. On a GPU nothing stands in for a missing library."""
    found = current_library()
    if found is not None and found.device_type == value.device.type:
        return found
    if value.device.type == "cpu":
        return None
    state = "there is none" if found is None else f"{found.path} is the {found.executor} one"
    raise KernelLibraryError(f"tensors on {value.device} need the CUDA kernel library; {state}", hint=f"set {VARIABLE}")


def _compact_shapes(
    q_window: Tensor, k: Tensor, v: Tensor, prompt_lengths: Tensor, prompt_budget: int, capacity: int,
    pool_kernel: int, page_size: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, kv_heads, _, size = k.shape
    shapes = compact_shapes(batch, kv_heads, size, capacity, page_size)
    return tuple(k.new_empty(shape, dtype=dtype or k.dtype) for shape, dtype in shapes)


def _hybrid_attention_shapes(
    query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, bounds: Tensor,
    cache_lengths: Tensor, page_size: int, top_r: int, top_k: int, token_budget: int, dense_until: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width = max(top_k, token_budget, dense_until)
    selected = query.new_empty((*k_cache.shape[:2], width), dtype=torch.int32)
    return query.new_empty(query.shape), selected


def _like_query(
    query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor
) -> Tensor:
    return query.new_empty(query.shape)


def _register() -> Any:
    """Define the operators and everything they run on; they exist as long as what is returned."""
    torch_library: Any = torch.library  # PyTorch leaves these functions untyped
    library = torch_library.Library("kvc", "DEF")
    bodies = (_compact, _compact_shapes), (_hybrid_attention, _hybrid_attention_shapes), (_dense_attention, _like_query)
    for schema, (body, shapes) in zip(SCHEMAS, bodies, strict=True):
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
        for device in ("CPU", "CUDA"):
            library.impl(name, body, device)
        torch_library.register_fake(f"kvc::{name}", shapes, lib=library)
    return library


_registered = _register()
kvc: Any = torch.ops.kvc
"""The operators; whoever imports this has them registered."""
