"""Dense decode attention by others, in the place of our kernel inside the whole model: the baselines to be beaten.

Each is a `DenseAttention` for rows that all have the same number of entries, as the benchmark fills them; each also
stores the step's token, as our kernel does. Nothing here waits for the device, so that a step can be captured.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvc_trt.backends.torch.decoder_options import DenseAttention
from kvc_trt.models.config import ModelConfig

PAGE = 16
"""Tokens of a page of FlashInfer's cache: the size that vLLM and others serve with."""


def sdpa_flash(model: ModelConfig, rows: int, capacity: int, entries: int, dtype: torch.dtype) -> DenseAttention:
    """PyTorch's scaled_dot_product_attention on its flash kernel, over the first `entries` slots."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(
        query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor
    ) -> Tensor:
        k_cache[:, :, entries - 1], v_cache[:, :, entries - 1] = k_new, v_new
        keys, values = k_cache[:, :, :entries], v_cache[:, :, :entries]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query.unsqueeze(2), keys, values, enable_gqa=True).squeeze(2)

    return attend


def flashinfer(model: ModelConfig, rows: int, capacity: int, entries: int, dtype: torch.dtype) -> DenseAttention:
    """FlashInfer's batch decode on tensor cores: each row's cache is read as pages of its own."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    heads, kv_heads, size = model.num_attention_heads, model.num_key_value_heads, model.head_size
    pages, row_pages = -(-entries // PAGE), capacity // PAGE
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * pages
    rows_first = torch.arange(rows, dtype=torch.int32, device="cuda")[:, None] * row_pages
    indices = (rows_first + torch.arange(pages, dtype=torch.int32, device="cuda")).flatten()
    last = torch.full((rows,), entries - (pages - 1) * PAGE, dtype=torch.int32, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "HND", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=starts.clone(), paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )  # fmt: skip
    wrapper.plan(
        starts, indices, last, heads, kv_heads, size, PAGE, q_data_type=dtype, kv_data_type=dtype,
        sm_scale=1 / math.sqrt(size),
    )  # fmt: skip

    def attend(
        query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor
    ) -> Tensor:
        caches = tuple(as_pages(cache, row_pages) for cache in (k_cache, v_cache))
        for cache, new in zip(caches, (k_new, v_new), strict=True):
            by_row = cache.view(rows, row_pages, kv_heads, PAGE, size)
            by_row[:, (entries - 1) // PAGE, :, (entries - 1) % PAGE] = new
        attended: Tensor = wrapper.run(query, caches)
        return attended

    return attend


def as_pages(cache: Tensor, row_pages: int) -> Tensor:
    """Return a row's memory [G,C,D] as pages [C/16,G,16,D]: other places for its tokens, the same bytes read."""
    rows, kv_heads, _, size = cache.shape
    return cache.view(rows * row_pages, kv_heads, PAGE, size)


BASELINES: dict[str, Callable[..., DenseAttention]] = {"sdpa_flash": sdpa_flash, "flashinfer": flashinfer}


def unavailable(name: str, capacity: int) -> str | None:
    """Return the reason why a baseline cannot be run here; None if it can."""
    if name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    if name == "flashinfer" and capacity % PAGE:
        return f"caches of {capacity} tokens are no whole number of its pages of {PAGE}"
    return None
