"""kvc_compact as a whole: the reference's tokens, its caches bit by bit, its bounds; in place and out of place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import CompactResult, KernelLibrary
from tests.plugins_cuda.cases import DTYPES, FP8, CompactCase, compact_case
from tests.plugins_cuda.checks import assert_same_bits, check_compact, run_compact
from tests.plugins_cuda.redzones import compact_between_redzones

HEAD_SIZES = (16, 24, 32, 64, 80, 96, 128, 200, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
PAGES = (1, 2, 3, 4, 5, 7, 9, 23, 48, 49, 200, 1000)


def assert_equal_results(one: CompactResult, other: CompactResult) -> None:
    for name, first, second in zip(CompactResult._fields, one, other, strict=True):
        assert_same_bits(first, second, name)


def check_exactly(library: KernelLibrary, case: CompactCase) -> CompactResult:
    """Inputs whose scores are exact, or that need none: no near-tie is admitted."""
    compared = check_compact(library, case)
    assert compared.near_ties == 0
    return run_compact(library, case)


# ---- Which tokens stay


def test_the_golden_case_keeps_its_tokens(library: KernelLibrary) -> None:
    """Sum over the group, then pool (algorithms.md, section 3), in a head of 16 with the other channels zero."""
    q_window, k = torch.zeros(1, 2, 2, 16), torch.zeros(1, 1, 12, 16)
    # The reference divides by sqrt(16), the published case by sqrt(2).
    q_window[0, 0, :, 0] = q_window[0, 1, :, 1] = 2 * math.sqrt(16 / 2)
    for position, channel, value in ((1, 0, 3), (4, 1, 3), (7, 0, 2), (8, 1, 2)):
        k[0, 0, position, channel] = value
    case = CompactCase(q_window, k, k.clone(), torch.tensor([12]), 10, 10, pool_kernel=3, page_size=4)
    assert run_compact(library, case).indices[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool", [1, 5, 63])
def test_random_prompts_equal_the_reference(scheduled_library: KernelLibrary, dtype: torch.dtype, pool: int) -> None:
    case = compact_case(lengths=[150, 24, 90, 25], dtype=dtype, pool=pool, size=64, seed=pool, fp8=pool == 5)
    check_compact(scheduled_library, case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool", [1, 3, 63])
def test_tied_tokens_stay_by_lowest_index(library: KernelLibrary, dtype: torch.dtype, pool: int) -> None:
    """Prompts of five distinct keys: hundreds of tokens score the same, and the lowest indices stay."""
    case = compact_case(lengths=[200, 131], dtype=dtype, pool=pool, ties=True, seed=3 + pool)
    check_exactly(library, case)


@pytest.mark.parametrize(("pool", "n"), [(63, 700), (511, 700), (511, 2300), (1025, 1100), (4095, 300)])
def test_plateaus_of_wide_pools_equal_the_reference(library: KernelLibrary, pool: int, n: int) -> None:
    check_compact(library, compact_case(lengths=[n, n - 101], pool=pool, budget=90, size=16, seed=pool))


@pytest.mark.parametrize(
    ("lengths", "window", "budget"),
    [
        ([32], 8, 32),  # n == budget
        ([33], 8, 32),  # one too many
        ([3, 8, 40], 8, 32),  # shorter than the window, equal to it
        ([40, 41], 16, 16),  # nothing but the window stays
        ([17], 16, 16),
        ([1], 1, 1),
        ([2], 1, 1),
        ([0, 50, 0], 4, 20),  # empty rows
        ([37, 99, 64, 12], 9, 31),  # a multiple of nothing
    ],
)
def test_every_prompt_length_equals_the_reference(
    library: KernelLibrary, lengths: Sequence[int], window: int, budget: int
) -> None:
    check_compact(library, compact_case(lengths=lengths, window=window, budget=budget))


def test_prompts_within_the_budget_are_not_scored(library: KernelLibrary) -> None:
    """S <= budget: also where the window is larger than the budget, and with queries that would be NaN."""
    case = compact_case(lengths=[20, 9], window=40, budget=20, capacity=33)
    check_exactly(library, replace(case, q_window=torch.full_like(case.q_window, math.nan)))


def test_lengths_outside_the_prompt_are_clamped(library: KernelLibrary) -> None:
    case = compact_case(lengths=[60, 40], budget=24)
    wild = replace(case, prompt_lengths=torch.tensor([10**12, -5]))
    tame = replace(case, prompt_lengths=torch.tensor([60, 0]))
    assert_equal_results(run_compact(library, wild), run_compact(library, tame))


def test_a_row_is_the_same_alone_and_in_a_batch(library: KernelLibrary) -> None:
    case = compact_case(lengths=[90, 300, 24, 150], size=32, pool=7, seed=9)
    together = run_compact(library, case)
    for row in range(4):
        tensors = {name: getattr(case, name)[row : row + 1] for name in ("q_window", "k", "v", "prompt_lengths")}
        alone = run_compact(library, replace(case, **tensors))
        assert_equal_results(alone, CompactResult(*(t[row : row + 1] for t in together)))


def test_a_long_prompt_equals_the_reference(library: KernelLibrary) -> None:
    """Several tiles of pooling, chunks of scores and parts of the selection, with the golden window of the paper."""
    case = compact_case(
        lengths=[4096], heads=4, kv_heads=2, size=128, window=32, budget=600, pool=63, page=3, dtype=torch.bfloat16
    )
    check_compact(library, case)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes_equal_the_reference(library: KernelLibrary, data: st.DataObject) -> None:
    group, kv_heads = data.draw(st.sampled_from(GROUPS)), data.draw(st.integers(1, 3))
    window = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(0, 260), min_size=1, max_size=3))
    longest = max(*lengths, 1) + data.draw(st.integers(0, 3))
    # A budget below the window is allowed where every prompt fits it.
    budget = data.draw(st.integers(min(window, longest), max(window, longest + 2)))
    case = compact_case(
        lengths=lengths, heads=group * kv_heads, kv_heads=kv_heads, size=data.draw(st.sampled_from(HEAD_SIZES)),
        window=window, length=longest, budget=budget, capacity=budget + data.draw(st.integers(0, 9)),
        pool=2 * data.draw(st.integers(0, 70)) + 1, page=data.draw(st.sampled_from(PAGES)),
        dtype=data.draw(st.sampled_from(DTYPES)), seed=data.draw(st.integers(0, 2**31)), ties=data.draw(st.booleans()),
        fp8=data.draw(st.booleans()),
    )  # fmt: skip
    check_compact(library, case)


# ---- Caches and bounds


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", PAGES)
@FP8
def test_every_page_size_equals_the_reference(library: KernelLibrary, fp8: bool, page: int, dtype: torch.dtype) -> None:
    """Pages smaller and larger than a block's share and than the cache; the last one partly filled, and beyond it."""
    sizes = {"budget": 101, "capacity": 211, "page": page, "dtype": dtype, "size": 48, "seed": page}
    case = compact_case(lengths=[130, 47, 5], fp8=fp8, **sizes)
    check_compact(library, case)


@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_size_equals_the_reference(library: KernelLibrary, size: int, dtype: torch.dtype) -> None:
    check_compact(library, compact_case(lengths=[70, 33], budget=40, size=size, page=3, dtype=dtype, seed=size))


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
def test_strided_keys_and_values_give_the_same_bits(library: KernelLibrary, order: tuple[int, ...]) -> None:
    """Keys stored as [B,S,G,D] and others, as slices of longer rows."""
    case = compact_case(lengths=[80, 61], budget=30, page=3)
    back = [order.index(axis) for axis in range(4)]
    wide = [torch.nn.functional.pad(t, (0, 16)).permute(*order).contiguous() for t in (case.k, case.v)]
    k, v = (t.permute(*back)[..., :32] for t in wide)
    strided = replace(case, k=k, v=v)
    assert strided.k.stride() != case.k.stride()
    device = library.device_type
    inputs = {**strided.arguments(), "k": wide[0].to(device), "v": wide[1].to(device)}
    inputs["k"], inputs["v"] = (inputs[name].permute(*back)[..., :32] for name in ("k", "v"))
    inputs = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in inputs.items()}
    found = CompactResult(*(t.cpu() for t in library.compact(**inputs)))
    assert_equal_results(found, run_compact(library, case))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_nan_and_infinite_keys_spoil_their_head_alone(
    scheduled_library: KernelLibrary, fp8: bool, dtype: torch.dtype
) -> None:
    """A NaN or +inf score makes every vote of its KV head NaN: those heads keep the first tokens and the window. The
    bounds of the pages say NaN, or the infinity, in fp8 the largest number; -inf bounds nothing from above, so it reads
    as the lowest number."""
    case = compact_case(lengths=[100, 90, 40], kv_heads=3, heads=6, budget=50, page=7, dtype=dtype, fp8=fp8)
    case.k[0, 0, 3, 5], case.k[0, 1, 17, 0], case.k[1, 2, 60] = math.nan, math.inf, -math.inf
    case.k[2, 0, 7:14], case.k[2, 1, 0, ::2], case.k[2, 2, 39, 3] = -math.inf, math.nan, math.inf
    found = run_compact(scheduled_library, case)
    first = [*range(42), *range(92, 100)]
    assert found.indices[0, 0, :50].tolist() == first
    expected = reference_ops.compute("compact", case.arguments())
    assert_equal_results(found, expected)


def test_copies_keep_every_bit(library: KernelLibrary) -> None:
    """Payloads of NaN, -0 and denormals in V arrive as they were."""
    case = compact_case(lengths=[60], budget=30, capacity=30, dtype=torch.float16)
    make = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**15), 2**15, case.v.shape, generator=make, dtype=torch.int32).to(torch.int16)
    case = replace(case, v=bits.view(torch.float16))
    found = run_compact(library, case)
    where = found.indices.long()[..., None].expand(-1, -1, -1, bits.shape[3])
    assert torch.equal(found.v_cache.view(torch.int16), bits.gather(2, where))


# ---- In place, and what must stay untouched


def run_in_place(library: KernelLibrary, case: CompactCase) -> CompactResult:
    moved = case.to(library.device_type)
    empty = replace(case, prompt_lengths=torch.zeros_like(case.prompt_lengths))
    poison = reference_ops.compute("compact", empty.arguments())
    others = [torch.full_like(t, -7).to(library.device_type) for t in poison[2:]]
    out = CompactResult(moved.k, moved.v, *others)
    library.compact(**moved.arguments(), out=out)
    return CompactResult(*(t.cpu() for t in out))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "budget", "size"), [(150, 40, 32), (700, 530, 16), (300, 290, 256)])
def test_in_place_equals_out_of_place(
    library: KernelLibrary, dtype: torch.dtype, n: int, budget: int, size: int
) -> None:
    lengths = [n, budget, budget + 1, 3, 0]
    case = compact_case(
        lengths=lengths, budget=budget, capacity=n, size=size, page=3, dtype=dtype, seed=n, fp8=n == 150
    )
    assert_equal_results(run_in_place(library, case), run_compact(library, case))


def test_chunks_of_a_move_do_not_overtake_each_other(scheduled_library: KernelLibrary) -> None:
    """Five chunks; almost every row moves by one slot or none, so that chunks read just after they write."""
    case = compact_case(lengths=[1200, 1101], budget=1100, capacity=1200, size=80, page=3, dtype=torch.float16)
    assert_equal_results(run_in_place(scheduled_library, case), run_compact(scheduled_library, case))


def test_in_place_compaction_moves_no_entry_of_prompts_that_fit(library: KernelLibrary) -> None:
    """No entry moves; slots past a row's end, which hold padding, become zero."""
    case = compact_case(lengths=[30, 12], length=30, budget=30, capacity=30)
    found = run_in_place(library, case)
    assert_equal_results(found, check_exactly(library, case))


@pytest.mark.parametrize("in_place", [False, True])
def test_compaction_without_bounds_gives_the_same_cache(library: KernelLibrary, in_place: bool) -> None:
    case = compact_case(lengths=[100, 40, 10], budget=37, capacity=100, page=5)
    found = compact_between_redzones(library, case, with_bounds=False, in_place=in_place)
    expected = run_compact(library, case)
    for name in ("k_cache", "v_cache", "indices", "cache_lengths"):
        assert_same_bits(found[name], getattr(expected, name), name)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 3, 50, 1000])
@pytest.mark.parametrize("in_place", [False, True])
@FP8
def test_compaction_writes_nothing_outside_its_buffers(
    library: KernelLibrary, fp8: bool, dtype: torch.dtype, page: int, in_place: bool
) -> None:
    case = compact_case(lengths=[131, 40, 36], budget=37, capacity=131, page=page, size=24, dtype=dtype, fp8=fp8)
    found = compact_between_redzones(library, case, with_bounds=True, in_place=in_place)
    expected = run_compact(library, case)
    for name in CompactResult._fields:
        assert_same_bits(found[name], getattr(expected, name), name)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("run", [run_compact, run_in_place])
@FP8
def test_schedules_give_the_same_bits(
    emulation: KernelLibrary, fp8: bool, run: Callable[..., CompactResult], dtype: torch.dtype
) -> None:
    sizes = {"budget": 66, "capacity": 420, "size": 80, "pool": 31, "page": 3, "dtype": dtype, "fp8": fp8}
    case = compact_case(lengths=[420, 77, 400], **sizes)
    results = []
    for order in ("forward", "reverse", "shuffled"):
        emulation.set_schedule(order, seed=5)
        results.append(run(emulation, case))
    emulation.set_schedule("forward")
    assert_equal_results(results[0], results[1])
    assert_equal_results(results[0], results[2])
