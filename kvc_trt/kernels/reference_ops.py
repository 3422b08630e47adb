"""The normative reference in the layout of the C ABI: caches with free slots, channel-major bounds, any cache type.

`torch.ops.kvc` computes this on CPU tensors, and the kernels are compared with it. Half types are widened to float32
and the results rounded back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvc_trt import reference
from kvc_trt.kernels.library import CompactResult
from kvc_trt.operators.dimensions import stored_pages
from kvc_trt.reference.bounds import LARGEST_FP8, append_in_place, fp8_codes, rounded_outward
from kvc_trt.reference.layers import rotated


@dataclass(frozen=True)
class CompactNumbers:
    """The attributes of KvcCompact and KvcCompactTurn, by their names."""

    prompt_budget: int
    capacity: int
    pool_kernel: int
    page_size: int
    fp8_bounds: int


@dataclass(frozen=True)
class StepNumbers:
    """The attributes of KvcHybridAttention, by their names."""

    page_size: int
    top_r: int
    top_k: int
    token_budget: int
    dense_until: int
    fp8_bounds: int
    recent: int


@dataclass(frozen=True)
class RotatedStepNumbers(StepNumbers):
    """The attributes of KvcHybridAttention, and of the rotation before it, by their names."""

    heads: int


def compute(operation: str, given: Mapping[str, Any]) -> Any:
    """Compute an operation of this module from the operator's inputs and attributes, by their names in its schema."""
    function, kind = globals()[operation], _NUMBERS.get(operation)
    if kind is None:
        return function(**given)
    names = {field.name for field in fields(kind)}
    numbers = kind(**{name: value for name, value in given.items() if name in names})
    return function(**{name: value for name, value in given.items() if name not in names}, numbers=numbers)


def compact(
    q_window: Tensor, k: Tensor, v: Tensor, prompt_lengths: Tensor, numbers: CompactNumbers,
    prompt_budgets: Tensor | None = None, pool_kernels: Tensor | None = None,
) -> CompactResult:  # fmt: skip
    """`KernelLibrary.compact`, computed by the reference."""
    windows = torch.full_like(prompt_lengths, q_window.shape[2])
    budgets, kernels = _of_rows(windows, numbers, prompt_budgets, pool_kernels)
    rows = q_window, k, v, prompt_lengths.clamp(0, k.shape[2])
    return _compacted(reference.compact, rows, budgets, kernels, numbers)


def compact_turn(
    q_window: Tensor, k: Tensor, v: Tensor, prompt_lengths: Tensor, window_lengths: Tensor, numbers: CompactNumbers,
    prompt_budgets: Tensor | None = None, pool_kernels: Tensor | None = None,
) -> CompactResult:  # fmt: skip
    """Compute KvcCompactTurn by the reference; the result has the form of `KernelLibrary.compute`."""
    windows = window_lengths.clamp(1, q_window.shape[2])
    budgets, kernels = _of_rows(windows, numbers, prompt_budgets, pool_kernels)
    rows = q_window, k, v, prompt_lengths.clamp(0, k.shape[2]), windows
    return _compacted(reference.compact_turn, rows, budgets, kernels, numbers)


def append_block(
    k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor, lengths: Tensor
) -> None:
    """Store a block's tokens at slots cache_lengths[b] and after, in place; those without a slot are dropped."""
    append_tables(((k_new, k_cache), (v_new, v_cache)), cache_lengths, lengths)


def append_tables(pairs: Iterable[tuple[Tensor, Tensor]], cache_lengths: Tensor, lengths: Tensor) -> None:
    """Do the same with each pair of new entries [B,G,M,.] and the table [B,G,C,.] that stores them."""
    for new, table in pairs:
        slots = table.shape[2]
        for b, (stored, count) in enumerate(_rows(cache_lengths, lengths, slots, new.shape[2])):
            end = min(stored + count, slots)
            table[b, :, stored:end] = new[b, :, : end - stored]


def raise_bounds(
    k_new: Tensor, bounds: Tensor, cache_lengths: Tensor, lengths: Tensor, page_size: int, fp8_bounds: int
) -> None:
    """Let the bounds [B,G,2D,P] of the pages in which a block's tokens are stored cover them, in place."""
    low, high = page_major(bounds, bounds.shape[3])
    for b, (stored, count) in enumerate(_rows(cache_lengths, lengths, bounds.shape[3] * page_size, k_new.shape[2])):
        for token in range(min(count, bounds.shape[3] * page_size - stored)):
            page, key = (stored + token) // page_size, k_new[b, :, token]
            least, most = rounded_outward(key, key) if fp8_bounds else (key, key)
            low[b, :, page] = torch.minimum(low[b, :, page], least)
            high[b, :, page] = torch.maximum(high[b, :, page], most)
    bounds.copy_(channel_major(low, high, k_new.dtype, fp8=bool(fp8_bounds)))


def join_block(
    k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return stored and new keys and values [B,G,C+M,D], zero past a row's end, and the rows' lengths [B]."""
    keys, values, joined = join_tables(((k_new, k_cache), (v_new, v_cache)), cache_lengths, lengths)
    return keys, values, joined


def join_tables(pairs: Iterable[tuple[Tensor, Tensor]], cache_lengths: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Do the same with each pair of new entries [B,G,M,.] and the table [B,G,C,.] of the stored ones."""
    found = []
    for new, cache in pairs:
        rows = _rows(cache_lengths, lengths, cache.shape[2], new.shape[2])
        table = torch.zeros_like(torch.cat([cache, new], dim=2))
        for b, (stored, count) in enumerate(rows):
            table[b, :, : stored + count] = torch.cat([cache[b, :, :stored], new[b, :, :count]], dim=1)
        found.append(table)
    return *found, cache_lengths.new_tensor([stored + count for stored, count in rows])


def replace_cache(
    k_cache: Tensor, v_cache: Tensor, slot_positions: Tensor, k_kept: Tensor, v_kept: Tensor, positions_kept: Tensor
) -> None:
    """Overwrite a cache and the positions of its slots, in place."""
    for state, kept in ((k_cache, k_kept), (v_cache, v_kept), (slot_positions, positions_kept)):
        state.copy_(kept)


def replace_bounds(bounds: Tensor, bounds_kept: Tensor, fp8_bounds: int) -> None:
    """Overwrite the bounds of a cache's pages, in place."""
    bounds.copy_(bounds_kept)


def hybrid_attention(
    query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, bounds: Tensor,
    cache_lengths: Tensor, numbers: StepNumbers,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`KernelLibrary.hybrid_attention`, computed by the reference."""
    active = _active(cache_lengths, k_cache)
    output = torch.zeros_like(query)
    width = max(numbers.top_k, numbers.token_budget, numbers.dense_until)
    selected = torch.full((*k_cache.shape[:2], width), -1, dtype=torch.int32, device=query.device)
    if not bool(active.any()):
        return output, selected
    page_size, fp8 = numbers.page_size, bool(numbers.fp8_bounds)
    slots, pages = cache_lengths[active], -(-k_cache.shape[2] // page_size)
    keys, values, page_min, page_max = (t[active] for t in (k_cache, v_cache, *page_major(bounds, pages)))
    new = k_new[active], v_new[active]
    append_in_place((keys, values, page_min, page_max), slots, *new, page_size=page_size, fp8=fp8)
    k_cache[active], v_cache[active] = keys, values
    bounds[active] = channel_major(page_min, page_max, query.dtype, fp8=fp8)
    attended, chosen = reference.hybrid_attention(
        _widened(query[active]), _widened(keys), _widened(values), slots + 1, _widened(page_min), _widened(page_max),
        page_size=page_size, top_r=numbers.top_r, top_k=numbers.top_k, token_budget=numbers.token_budget,
        dense_until=numbers.dense_until, force_recent=numbers.recent,
    )  # fmt: skip
    output[active], selected[active] = attended.to(query.dtype), chosen
    return output, selected


def dense_attention(
    query: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor
) -> Tensor:
    """`KernelLibrary.dense_attention`, computed by the reference."""
    active = _active(cache_lengths, k_cache)
    output = torch.zeros_like(query)
    if not bool(active.any()):
        return output
    slots, keys, values = cache_lengths[active], k_cache[active], v_cache[active]
    append_in_place((keys, values, None, None), slots, k_new[active], v_new[active], page_size=1)
    k_cache[active], v_cache[active] = keys, values
    attended = reference.dense_attention(_widened(query[active]), _widened(keys), _widened(values), slots + 1)
    output[active] = attended.to(query.dtype)
    return output


def rotated_hybrid_attention(
    joined: Tensor, cosines: Tensor, sines: Tensor, k_cache: Tensor, v_cache: Tensor, bounds: Tensor,
    cache_lengths: Tensor, numbers: RotatedStepNumbers,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`hybrid_attention` behind the rotary embedding: joined [B,H+2G,D], cosines, sines [B,D/2]; also the query."""
    token = rotated_token(joined, cosines, sines, numbers.heads)
    output, selected = hybrid_attention(*token, k_cache, v_cache, bounds, cache_lengths, numbers)
    return output, selected, token[0]


def rotated_dense_attention(
    joined: Tensor, cosines: Tensor, sines: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """`dense_attention` behind the rotary embedding, as `rotated_hybrid_attention`."""
    token = rotated_token(joined, cosines, sines, heads)
    return dense_attention(*token, k_cache, v_cache, cache_lengths), token[0]


def rotated_token(joined: Tensor, cosines: Tensor, sines: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split joined [B,H+2G,D] to query [B,H,D], key and value [B,G,D], the first two rotated in float32."""
    kv_heads = (joined.shape[1] - heads) // 2
    query, key, value = torch.split(joined, [heads, kv_heads, kv_heads], dim=1)
    angles = cosines[:, None], sines[:, None]
    return rotated(query.float(), *angles).to(joined.dtype), rotated(key.float(), *angles).to(joined.dtype), value


def channel_major(page_min: Tensor, page_max: Tensor, dtype: torch.dtype, *, fp8: bool = False) -> Tensor:
    """Turn the reference's bounds [B,G,n,D] into an engine's [B,G,2D,P]; empty pages get the lowest finite value.

    `dtype` is the type of the cache. With `fp8` bounds are rounded up, and the result has the bits of E5M2, as INT8.
    """
    pages = page_max.shape[2]
    bounds = torch.cat([page_max, -page_min], dim=3).transpose(2, 3)
    bounds = pad(bounds, (0, stored_pages(pages, 1, dtype.itemsize, fp8) - pages), value=-torch.inf)
    if fp8:
        return fp8_codes(bounds.contiguous())
    return bounds.masked_fill(bounds == -torch.inf, torch.finfo(dtype).min).to(dtype).contiguous()


def page_major(bounds: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    """Undo `channel_major`: `bounds` [B,G,2D,P] -> page_min, page_max [B,G,pages,D]; FLOAT if they are fp8."""
    bounds, lowest = bounds[..., :pages], torch.finfo(bounds.dtype).min if bounds.is_floating_point() else -LARGEST_FP8
    if not bounds.is_floating_point():
        bounds = bounds.contiguous().view(torch.float8_e5m2).float()
    empty = bounds == lowest
    high, low = bounds.masked_fill(empty, -torch.inf).transpose(2, 3).chunk(2, dim=3)
    return -low, high


def _of_rows(
    windows: Tensor, numbers: CompactNumbers, own_budgets: Tensor | None, own_kernels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return budget and pool kernel of each row: the call's, or the rows' own, the nearest that are allowed."""
    budget, kernel = numbers.prompt_budget, numbers.pool_kernel
    budgets, kernels = torch.full_like(windows, budget), torch.full_like(windows, kernel)
    if own_budgets is not None and own_kernels is not None:
        budgets = own_budgets.maximum(windows).clamp(max=budget)
        kernels = (own_kernels.clamp(1, kernel) - 1) // 2 * 2 + 1
    return budgets, kernels


def _compacted(
    rule: Callable[..., reference.Compacted], rows: tuple[Tensor, ...], budgets: Tensor, kernels: Tensor,
    numbers: CompactNumbers,
) -> CompactResult:  # fmt: skip
    """Apply `rule` to the rows that have tokens: `rows` are queries, keys, values and lengths, then its own."""
    _, k, v, lengths, *_ = rows
    batch, heads, length, size = k.shape
    capacity = numbers.capacity
    if capacity < (slots := min(int(budgets.max()), length)):
        raise ValueError(f"capacity is {capacity}; expected at least {slots} for k of shape {list(k.shape)}")
    k_cache, v_cache = (k.new_zeros(batch, heads, capacity, size) for _ in range(2))
    indices = torch.full((batch, heads, capacity), -1, dtype=torch.int32, device=k.device)
    filled = lengths > 0
    if bool(filled.any()):
        inputs = (_widened(tensor[filled]) if tensor.is_floating_point() else tensor[filled] for tensor in rows)
        kept = rule(*inputs, prompt_budget=budgets[filled], pool_kernel=kernels[filled])
        slots = kept.indices.shape[2]
        k_cache[filled, :, :slots] = kept.keys.to(k.dtype)
        v_cache[filled, :, :slots] = kept.values.to(v.dtype)
        indices[filled, :, :slots] = kept.indices
    stored = lengths.minimum(budgets)
    bounds = bounds_of(k_cache, stored, numbers.page_size, k.dtype, numbers.fp8_bounds)
    return CompactResult(k_cache, v_cache, bounds, stored, indices)


def bounds_of(keys: Tensor, stored: Tensor, page_size: int, dtype: torch.dtype, fp8_bounds: int) -> Tensor:
    """Return the bounds [B,G,2D,P] of the first `stored` [B] keys [B,G,C,D] of each row, for caches of `dtype`."""
    extremes = reference.page_bounds(_widened(keys), stored, page_size, fp8=bool(fp8_bounds))
    return channel_major(*extremes, dtype, fp8=bool(fp8_bounds))


def _rows(cache_lengths: Tensor, lengths: Tensor, slots: int, block: int) -> list[tuple[int, int]]:
    """Return stored entries and new tokens of each row, as the nearest numbers in their ranges."""
    return list(zip(cache_lengths.clamp(0, slots).tolist(), lengths.clamp(0, block).tolist(), strict=True))


def _active(cache_lengths: Tensor, k_cache: Tensor) -> Tensor:
    return (cache_lengths >= 0) & (cache_lengths < k_cache.shape[2])


def _widened(value: Tensor) -> Tensor:
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


_NUMBERS: dict[str, type[CompactNumbers | StepNumbers]] = {
    "compact": CompactNumbers,
    "compact_turn": CompactNumbers,
    "hybrid_attention": StepNumbers,
    "rotated_hybrid_attention": RotatedStepNumbers,
}
"""The class of the numbers of each function above that takes them as one object."""
