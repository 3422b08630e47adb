"""Observation scores alone: votes of the window for every earlier key, before pooling and selection see them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvc_trt.kernels.library import SCHEDULES, KernelLibrary, empty_outputs
from kvc_trt.kernels.structs import struct_of
from kvc_trt.methods.rankings.rounding import truncated_share
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.reference import compaction
from tests.plugins_cuda.cases import DTYPES, dyadic
from tests.plugins_cuda.checks import truncates

TOLERANCE = 1e-5
"""Relative, for logits of ordinary size."""
SMALLEST = 2.0**-140
"""Below the normal range float32 has no relative precision."""
CHUNK = 512
"""Keys of one block."""
MAP_NORESERVE = 0x4000
"""Linux; Python's mmap has no name for it before 3.13."""


def votes(library: KernelLibrary, q_window: Tensor, k: Tensor, lengths: Sequence[int], budget: int) -> Tensor:
    """[B,G,S] as kvc_compact leaves them in its workspace, whose last two parts are votes and pooled votes, rows of
    these in multiples of four; NaN where nothing was written."""
    (batch, heads, window, size), (_, kv_heads, length, _) = q_window.shape, k.shape
    device = library.device_type
    q_window, k = (t.to(device) for t in (q_window, k))
    prompt_lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
    inputs = {"q_window": q_window, "k": k, "v": k, "prompt_lengths": prompt_lengths}
    out = empty_outputs(COMPACT, {**inputs, "capacity": budget, "page_size": 1, "fp8_bounds": 0})
    params = struct_of(COMPACT)(
        dtype=DTYPES.index(k.dtype), batch=batch, heads=heads, kv_heads=kv_heads, head_size=size, window=window,
        pool_kernel=1, page_size=1, prompt_length=length, prompt_budget=budget, capacity=budget,
        kv_stride_batch=k.stride(0), kv_stride_head=k.stride(1), kv_stride_token=k.stride(2),
        **{name: value.data_ptr() for name, value in {**inputs, **out}.items()},
    )  # fmt: skip
    total = library.workspace_bytes("kvc_compact", params)
    votes_bytes, keys_bytes = (
        -(-4 * batch * kv_heads * tokens // 256) * 256 for tokens in (length, -(-length // 4) * 4)
    )
    workspace = torch.full((total // 4 + 64,), math.nan, dtype=torch.float32, device=device)
    first = -workspace.data_ptr() % 256 // 4
    library.call("kvc_compact", params, workspace.data_ptr() + 4 * first, total)
    start = first + (total - votes_bytes - keys_bytes) // 4
    return workspace[start : start + batch * kv_heads * length].reshape(batch, kv_heads, length).cpu()


def expected_votes(q_window: Tensor, k: Tensor, lengths: Sequence[int], budget: int) -> tuple[Tensor, Tensor]:
    """Return the reference in float64 on the same rounded inputs, NaN where nothing is voted on, and M [B,G]."""
    window, result = q_window.shape[2], torch.full(k.shape[:3], math.nan, dtype=torch.float64)
    scores = compaction.scores(q_window.double(), k.double(), torch.tensor(lengths).clamp(min=1), pool_kernel=1)
    for b, n in enumerate(lengths):
        if n > budget:
            result[b, :, : n - window] = scores.values[b, :, : n - window]
    return result, scores.magnitude


def assert_votes(found: Tensor, expected: Tensor, tolerance: float | Tensor = TOLERANCE) -> None:
    assert torch.equal(found.isnan(), expected.isnan()), "NaN elsewhere than in the reference"
    error = ((found.double() - expected).abs() - SMALLEST) / expected.abs().clamp(min=1e-300)
    assert bool((error.nan_to_num(0.0) <= tolerance).all()), f"relative error {error.nan_to_num(0.0).max().item():.2e}"


def inputs(
    lengths: Sequence[int], *, kv_heads: int = 2, group: int = 2, size: int = 32, window: int = 8,
    dtype: torch.dtype = torch.float32, seed: int = 0, length: int | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Random q_window and k; slots past a row's end hold NaN."""
    make = torch.Generator().manual_seed(seed)
    q_window = scale * torch.randn((len(lengths), kv_heads * group, window, size), generator=make)
    k = torch.randn((len(lengths), kv_heads, length or max(lengths), size), generator=make)
    for row, n in enumerate(lengths):
        k[row, :, n:] = math.nan
    return q_window.to(dtype), k.to(dtype)


def check(library: KernelLibrary, q_window: Tensor, k: Tensor, lengths: Sequence[int], budget: int) -> None:
    found = votes(library, q_window, k, lengths, budget)
    expected, magnitude = expected_votes(q_window, k, lengths, budget)
    assert_votes(found, expected, TOLERANCE + truncation(library, magnitude, k))


def truncation(library: KernelLibrary, magnitude: Tensor, k: Tensor) -> Tensor:
    """Largest relative change to votes by tensor cores, [B,G,1]: two logits are off, its own and its sum of weights."""
    off = truncated_share(k.shape[3]) * magnitude[..., None]
    return torch.expm1(2 * off) if truncates(library, k.dtype) else torch.zeros_like(off)


def contiguous(k: Tensor) -> Tensor:
    return k


def tokens_outside(k: Tensor) -> Tensor:
    """[B,S,G,D] in memory, as a projection writes it."""
    return k.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_fused(k: Tensor) -> Tensor:
    """Return a slice of [B,S,G,3D] in memory, whose other parts are NaN."""
    batch, kv_heads, length, size = k.shape
    fused = torch.full((batch, length, kv_heads, 3 * size), math.nan, dtype=k.dtype)
    fused[..., size : 2 * size] = k.transpose(1, 2)
    return fused[..., size : 2 * size].transpose(1, 2)


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (contiguous, tokens_outside, part_of_fused)


@st.composite
def shapes(draw: Any) -> dict[str, Any]:
    window = draw(st.integers(1, 40))
    budget = draw(st.integers(window, window + 20))
    lengths = draw(st.lists(st.integers(0, budget + 70), min_size=1, max_size=3))
    length = max(budget + 1, *lengths, 1) + draw(st.integers(0, 5))
    return {
        "lengths": lengths, "length": length, "budget": budget, "window": window,
        "kv_heads": draw(st.integers(1, 2)), "group": draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16])),
        "size": draw(st.sampled_from([16, 24, 32, 40, 64, 72, 80, 96, 128, 136, 200, 256])),
        "dtype": draw(st.sampled_from(DTYPES)), "layout": draw(st.sampled_from(LAYOUTS)),
        "seed": draw(st.integers(0, 2**31)),
    }  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes())
def test_votes_of_random_shapes_equal_the_reference(library: KernelLibrary, shape: dict[str, Any]) -> None:
    layout, budget, lengths = shape.pop("layout"), shape.pop("budget"), shape["lengths"]
    q_window, k = inputs(**shape)
    check(library, q_window, layout(k), lengths, budget)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 5, 2 * CHUNK + 40, 3 * CHUNK])
def test_votes_of_prompts_around_a_chunk_equal_the_reference(
    library: KernelLibrary, length: int, dtype: torch.dtype
) -> None:
    """The window may be in one chunk, in two, or begin with one."""
    lengths = [length, CHUNK + 3]
    q_window, k = inputs(lengths, dtype=dtype, size=16, kv_heads=1)
    check(library, q_window, k, lengths, 16)


@pytest.mark.parametrize(
    ("window", "group", "size", "dtype"),
    [
        (48, 5, 256, torch.float16),
        (12, 5, 256, torch.float32),
        (1024, 1, 16, torch.bfloat16),
        (120, 7, 64, torch.float32),
    ],
)
def test_more_query_rows_than_fit_shared_memory_equal_the_reference(
    library: KernelLibrary, window: int, group: int, size: int, dtype: torch.dtype
) -> None:
    """Rows beyond shared memory are taken block by block; the last block is partly filled."""
    lengths = [window + 60]
    q_window, k = inputs(lengths, window=window, group=group, size=size, dtype=dtype, kv_heads=1)
    check(library, q_window, k, lengths, window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_get_equal_bits(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Holds at any position in a tile, a warp's share, a chunk, the batch."""
    make, n, window, distinct = torch.Generator().manual_seed(1), 2 * CHUNK + 77, 5, 3
    q_window, keys = inputs([distinct], kv_heads=1, group=3, size=40, window=window, dtype=dtype)
    drawn = torch.randint(distinct, (2, n), generator=make)
    k = keys[0, 0][drawn][:, None].contiguous()
    k[1, :, n - window :] = k[0, :, n - window :]
    k[1, 0, : n - window] = k[0, 0, : n - window].flip(0)
    found = votes(library, q_window.expand(2, -1, -1, -1).contiguous(), k, [n, n], window)[0, 0, : n - window]
    for key in range(distinct):
        assert found[drawn[0, : n - window] == key].unique().numel() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_votes_have_the_same_bits_in_every_schedule(emulation: KernelLibrary, dtype: torch.dtype) -> None:
    lengths = [CHUNK + 90, 30, 12]
    q_window, k = inputs(lengths, group=3, window=12, size=48, dtype=dtype, kv_heads=1)
    results = []
    for schedule in SCHEDULES:
        emulation.set_schedule(schedule, seed=7)
        results.append(votes(emulation, q_window, k, lengths, 20))
    emulation.set_schedule("forward")
    assert results[0].view(torch.int32).equal(results[1].view(torch.int32))
    assert results[0].view(torch.int32).equal(results[2].view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_its_batch(library: KernelLibrary, dtype: torch.dtype) -> None:
    n, window, budget = CHUNK + 60, 6, 20
    q_window, k = inputs([40, n, 2 * CHUNK], window=window, dtype=dtype)
    together = votes(library, q_window, k, [40, n, 2 * CHUNK], budget)[1, :, : n - window]
    alone = votes(library, q_window[1:2], k[1:2, :, :n].contiguous(), [n], budget)[0, :, : n - window]
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_votes_of_large_logits_stay_near_exact_ones(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Hundreds: only the rounding of the logits themselves is left, as for a near-tie."""
    lengths = [300]
    q_window, k = inputs(lengths, size=64, dtype=dtype, scale=40.0)
    expected, magnitude = expected_votes(q_window, k, lengths, 16)
    assert magnitude.min() > 100
    found = votes(library, q_window, k, lengths, 16)
    rounding = 2.0**-20 * (1 + magnitude)[..., None]
    assert_votes(found, expected, rounding + truncation(library, magnitude, k))


def poison_keys(k: Tensor, q: Tensor) -> None:
    k[0, 0, 30, 3] = math.nan


def poison_last_key(k: Tensor, q: Tensor) -> None:
    """Only the last window row sees the last key; the row's probabilities are NaN everywhere."""
    k[0, 0, -1, 3] = math.nan


def infinite_keys(k: Tensor, q: Tensor) -> None:
    """Logits of +inf in some rows (NaN everywhere), -inf in others."""
    k[0, 0, 30, 3] = math.inf


def vanishing_keys(k: Tensor, q: Tensor) -> None:
    """Logits of -inf alone: keys that get no vote, and nothing becomes NaN."""
    q[..., 3] = q[..., 3].abs() + 1
    k[0, 0, 10:50, 3] = -math.inf


def vanishing_prompt(k: Tensor, q: Tensor) -> None:
    """Rows without a finite logit."""
    q[..., 3] = q[..., 3].abs() + 1
    k[0, 0, :, 3] = -math.inf


def poison_query(k: Tensor, q: Tensor) -> None:
    q[0, 1, 2, 5] = math.nan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spoil", [poison_keys, poison_last_key, infinite_keys, vanishing_keys, vanishing_prompt, poison_query]
)
def test_nan_and_infinity_spoil_their_head_alone(
    library: KernelLibrary, spoil: Callable[[Tensor, Tensor], None], dtype: torch.dtype
) -> None:
    """NaN and infinity have the reference's effect, and only on their own KV head."""
    lengths = [150, 140]
    q_window, k = inputs(lengths, window=9, size=24, dtype=dtype)
    k[1, :, lengths[1] :] = 0
    spoil(k, q_window)
    check(library, q_window, k, lengths, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overflowing_products_make_votes_of_their_head_nan(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Beyond float32: +inf in every row of a group, whose votes are NaN; the other KV head has its own."""
    q_window, k = inputs([150], window=9, size=24, dtype=dtype)
    q_window[0, :2, :, 3], k[0, 0, 30, 3] = torch.finfo(dtype).max, torch.finfo(dtype).max
    found = votes(library, q_window, k, [150], 16)
    assert bool(found[0, 0, : 150 - 9].isnan().all())
    assert not found[0, 1, : 150 - 9].isnan().any()


def test_rows_that_fit_are_not_voted_on(library: KernelLibrary) -> None:
    """n <= budget, and lengths outside 0..S; nothing is written from n-W on."""
    lengths = [21, 20, 3, 0, -4, 99]
    q_window, k = inputs([21] * 6, window=15, size=16)
    found = votes(library, q_window, k, lengths, 20)
    written = ~found.isnan()
    assert written.sum((1, 2)).tolist() == [12, 0, 0, 0, 0, 12]
    assert bool(written[[0, 5], :, :6].all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_at_offsets_beyond_32_bits_are_read(emulation: KernelLibrary, dtype: torch.dtype) -> None:
    """Keys 2^26 elements apart, in memory that is reserved and touched only where the keys are."""
    n, window, stride = 40, 4, 2**26
    q_window, k = inputs([n], kv_heads=1, window=window, size=16, dtype=dtype)
    memory = mmap.mmap(-1, n * stride * k.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    spread = torch.frombuffer(memory, dtype=dtype).as_strided(k.shape, (n * stride, n * stride, stride, 1))
    spread.copy_(k)
    found = votes(emulation, q_window, spread, [n], 8)
    assert torch.equal(found[..., : n - window], votes(emulation, q_window, k, [n], 8)[..., : n - window])


def test_dyadic_keys_give_equal_votes_in_every_type(library: KernelLibrary) -> None:
    """Logits without rounding: fp16, bf16 and fp32 see the same ones."""
    make = torch.Generator().manual_seed(3)
    q_window, k = dyadic((1, 4, 4, 64), make) / 4, dyadic((1, 2, 90, 64), make)
    found = [votes(library, q_window.to(dtype), k.to(dtype), [90], 10) for dtype in DTYPES]
    expected, _ = expected_votes(q_window, k, [90], 10)
    for one in found:
        assert_votes(one, expected)


def test_votes_match_the_golden_case(library: KernelLibrary) -> None:
    """W = 2, ks = 3, n = 12, two heads; two channels in use, scaled so that D = 16 gives their logits."""
    k, q_window = torch.zeros(1, 1, 12, 16), torch.zeros(1, 2, 2, 16)
    k[0, 0, 1, 0], k[0, 0, 4, 1], k[0, 0, 7, 0], k[0, 0, 8, 1] = 3, 3, 2, 2
    q_window[0, 0, :, 0] = q_window[0, 1, :, 1] = 2 * math.sqrt(8)
    found = votes(library, q_window, k, [12], 10)[0, :, :10]
    pooled = torch.nn.functional.max_pool1d(found, 3, stride=1, padding=1)[0]
    expected = torch.tensor([1.470537] * 6 + [0.373279] * 4)
    assert torch.allclose(pooled, expected, rtol=2e-6)


def test_grids_depend_on_sizes_and_not_on_lengths(emulation: KernelLibrary) -> None:
    """Whatever the lengths on the device: the launches can be captured in a CUDA graph."""
    grids = []
    q_window, k = inputs([700, 700])
    for lengths in ([700, 700], [0, 30]):
        launches = emulation.launches_of(lambda lengths=lengths: votes(emulation, q_window, k, lengths, 16))
        named = [(launch.name.decode(), tuple(launch.grid)) for launch in launches]
        grids.append([launch for launch in named if launch[0].startswith("observation")])
    assert grids[0] == grids[1]
    assert [name for name, _ in grids[0]] == ["observation_statistics", "observation_merge", "observation_votes"]
    assert [grid for _, grid in grids[0]] == [(2, 2, 2), (8, 1, 1), (2, 2, 2)]
