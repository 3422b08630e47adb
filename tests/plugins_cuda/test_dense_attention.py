"""kvc_dense_attention: exact attention over all entries, the same bits in any batch, schedule and capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import SCHEDULES, KernelLibrary
from kvc_trt.kernels.structs import struct_of
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from tests.plugins_cuda.cases import DTYPES, StepCase, dyadic, step_case
from tests.plugins_cuda.checks import assert_close, assert_same_bits, attend_exactly, check_dense
from tests.plugins_cuda.redzones import Guarded

HEAD_SIZES = (16, 24, 32, 40, 64, 72, 80, 96, 128, 136, 200, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16)
BORDERS = (1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 384, 385, 511, 513)
"""Entries around the ends of a tile, a round of tiles, and a split."""


def dense_case(lengths: Sequence[int], *, group: int = 4, kv_heads: int = 1, **options: object) -> StepCase:
    return step_case(lengths=lengths, heads=group * kv_heads, kv_heads=kv_heads, **options)  # type: ignore[arg-type]


def run_dense(library: KernelLibrary, case: StepCase) -> Tensor:
    moved = case.to(library.device_type)
    return library.dense_attention(**moved.dense_arguments()).cpu()


def only_row(case: StepCase, row: int) -> StepCase:
    names = ("query", "k_new", "v_new", "k_cache", "v_cache", "bounds", "cache_lengths")
    return replace(case, **{name: getattr(case, name)[row : row + 1] for name in names})


def exact_row(case: StepCase, row: int) -> Tensor:
    """float64 attention of one active row after its append."""
    mine = case.to("cpu")
    reference_ops.dense_attention(**mine.dense_arguments())
    everything = torch.arange(int(case.cache_lengths[row]) + 1).expand(case.k_cache.shape[1], -1)
    return attend_exactly(case.query[row], mine.k_cache[row], mine.v_cache[row], everything)


# ---- Values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_every_head_size_equals_the_reference(library: KernelLibrary, dtype: torch.dtype, size: int) -> None:
    check_dense(library, dense_case([40, 300], group=3, kv_heads=2, size=size, dtype=dtype, seed=size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_size_equals_the_reference(library: KernelLibrary, dtype: torch.dtype, group: int) -> None:
    check_dense(library, dense_case([17, 290], group=group, kv_heads=2, size=48, dtype=dtype, seed=group))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_borders_of_tiles_and_splits_equal_the_reference(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Rows of all these lengths in one batch, full and inactive ones among them."""
    case = dense_case([m - 1 for m in BORDERS] + [-1, 519, 518], group=2, size=16, capacity=519, dtype=dtype)
    check_dense(library, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_many_splits_equal_the_reference(library: KernelLibrary, dtype: torch.dtype) -> None:
    """40 splits of 128 tokens, then 33 of 256: between them the count reaches its limit and splits begin to grow. Then
    43 of 384, three tiles for each warp."""
    check_dense(library, dense_case([5000], group=4, size=32, dtype=dtype))
    check_dense(library, dense_case([8191, 8192], group=1, size=16, dtype=dtype))
    check_dense(library, dense_case([16500], group=1, size=16, dtype=dtype))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes_equal_the_reference(library: KernelLibrary, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(-1, 700), min_size=1, max_size=3))
    case = dense_case(
        lengths, group=data.draw(st.sampled_from(GROUPS)), kv_heads=data.draw(st.integers(1, 3)),
        size=8 * data.draw(st.integers(2, 32)), dtype=data.draw(st.sampled_from(DTYPES)),
        capacity=max(*lengths, 0) + data.draw(st.integers(1, 77)), seed=data.draw(st.integers(0, 1000)),
    )  # fmt: skip
    check_dense(library, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_count_with_more_than_their_type(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Outputs are within 3e-5 before their own rounding: weights rounded to bfloat16 would bring 1e-3 or more."""
    case = dense_case([300], group=8, size=64, dtype=dtype, seed=3)
    case.k_cache[:, :, :300] *= 2  # weights spread over several powers of two
    exact = exact_row(case, 0)
    found = run_dense(library, case)[0].double()
    rounding = exact.abs() * torch.finfo(dtype).eps * (0.5 if dtype != torch.float32 else 0.0)
    assert float(((found - exact).abs() - rounding).max()) <= 3e-5 * float(exact.abs().max())


# ---- The same bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 128, 256])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(library: KernelLibrary, dtype: torch.dtype, size: int) -> None:
    case = dense_case([600, 3, -1, 257, 0, 130], group=5, kv_heads=2, size=size, dtype=dtype)
    together = run_dense(library, case)
    for row in range(len(together)):
        assert torch.equal(run_dense(library, only_row(case, row))[0], together[row]), f"row {row}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_capacity_changes_no_bit(library: KernelLibrary, dtype: torch.dtype) -> None:
    """The grid and the scratch memory grow with the capacity, a row's splits do not."""
    small = dense_case([700, 100], group=3, size=32, capacity=701, dtype=dtype)
    large = dense_case([700, 100], group=3, size=32, capacity=9001, dtype=dtype)
    cut = {name: getattr(large, name)[:, :, :701].clone() for name in ("k_cache", "v_cache")}
    small = replace(large, **cut)
    assert torch.equal(run_dense(library, small), run_dense(library, large))


@pytest.mark.parametrize("size", [64, 128])
def test_tiles_ahead_change_no_bit(library: KernelLibrary, size: int) -> None:
    """A warp copies two tiles ahead where blocks are few, one where they are many."""
    rows, dtype = 140, torch.bfloat16
    many = dense_case([37 + row for row in range(rows)], group=2, size=size, capacity=200, dtype=dtype)
    few = only_row(many, rows - 1)
    assert torch.equal(run_dense(library, many)[rows - 1], run_dense(library, few)[0])
    if library.executor == "emulation":
        ahead = [library.launches_of(lambda case=case: run_dense(library, case))[-1] for case in (few, many)]
        assert ahead[0].dynamic_shared_bytes == 2 * ahead[1].dynamic_shared_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [4, 16])
def test_every_schedule_gives_the_same_bits(emulation: KernelLibrary, dtype: torch.dtype, group: int) -> None:
    """A missing barrier, and a merge in the order of arrival, would show as another result."""
    case = dense_case([900, 200, -1], group=group, kv_heads=2, size=40, dtype=dtype)
    results = []
    for number, order in enumerate((*SCHEDULES, "shuffled")):
        emulation.set_schedule(order, seed=number)
        results.append(run_dense(emulation, case))
    emulation.set_schedule("forward")
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[100, 7, 255], [600, 383]], ids=["one split", "splits"])
def test_hybrid_that_fits_has_the_bits_of_dense(library: KernelLibrary, dtype: torch.dtype, lengths: list[int]) -> None:
    """A row fits by the budget, by dense_until, or because top_k covers it."""
    case = dense_case([*lengths, -1], group=4, kv_heads=2, size=80, dtype=dtype, top_k=16)
    dense = run_dense(library, case)
    slots = case.k_cache.shape[2]
    for limits in (
        {"token_budget": slots, "dense_until": 0}, {"token_budget": 0, "dense_until": slots},
        {"token_budget": 0, "dense_until": 0, "top_k": slots},
    ):  # fmt: skip
        moved = replace(case, **limits).to(library.device_type)
        output, selected = library.hybrid_attention(**moved.arguments())
        assert torch.equal(output.cpu(), dense), limits
        assert selected is not None
        assert selected[:2, :, :5].tolist() == [[[0, 1, 2, 3, 4]] * 2] * 2


# ---- Extreme and undefined values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [40, 700])
def test_large_scores_do_not_overflow(library: KernelLibrary, dtype: torch.dtype, m: int) -> None:
    """Scores up to +-16384 in steps of 256, exact in any order: one softmax weight is 1, all others vanish or tie."""
    make = torch.Generator().manual_seed(m)
    case = dense_case([m - 1], group=3, size=16, dtype=dtype)
    case.query.copy_(64 * dyadic(tuple(case.query.shape), make))
    for keys in (case.k_cache, case.k_new):
        keys.copy_(64 * dyadic(tuple(keys.shape), make))
    check_dense(library, case)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [90, 700])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_keys_spoil_their_head_alone(
    library: KernelLibrary, dtype: torch.dtype, m: int, value: float
) -> None:
    """As in torch.softmax, NaN and +inf scores make a head NaN; -inf ones have no weight; other heads do not change."""
    case = dense_case([m - 1, m - 1], group=3, kv_heads=2, size=32, dtype=dtype)
    case.k_cache[0, 1, 20:40, 5] = value  # a whole tile among them
    found, exact = run_dense(library, case), exact_row(case, 0)
    broken = exact.isnan().any(-1)
    assert bool(broken.any())  # the query's signs differ, so +-inf comes out both ways
    assert_same_bits(found[0].isnan().all(-1), broken, "heads that are NaN")
    assert_same_bits(found[0].isnan().any(-1), broken, "heads that have a NaN")
    assert_close(found[0][~broken], exact[~broken], "the other heads")
    assert_close(found[1], exact_row(case, 1), "the other row")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [40, 400])
def test_a_row_without_a_finite_score_is_nan(library: KernelLibrary, dtype: torch.dtype, m: int) -> None:
    """All scores -inf: 0 / 0, as torch.softmax. All but the last: that token's value, as exact arithmetic has it."""
    case = dense_case([m - 1, m - 1], group=2, size=16, dtype=dtype)
    case.query[..., 0] = 1.0
    case.k_cache[..., 0] = -math.inf
    case.k_new[0, :, 0] = -math.inf
    found = run_dense(library, case)
    assert bool(found[0].isnan().all())
    assert torch.equal(found[1], case.v_new[1].expand(2, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [40, 400])
def test_undefined_values_stay_in_their_channel(library: KernelLibrary, dtype: torch.dtype, m: int) -> None:
    """An infinity may become NaN (weights are added in two parts), but neither gets lost nor spreads."""
    case = dense_case([m - 1], group=4, size=64, dtype=dtype)
    case.v_cache[0, 0, 30, 7], case.v_cache[0, 0, 3, 50] = math.inf, math.nan
    found, exact = run_dense(library, case)[0], exact_row(case, 0)
    assert torch.equal(found.isfinite(), exact.isfinite())
    kept = exact.isfinite().all(0)
    assert kept.sum() == 62
    assert_close(found[:, kept], exact[:, kept], "the other channels")


def test_a_zero_query_gives_the_mean_of_the_values(library: KernelLibrary) -> None:
    """Equal scores: the mean of the values, which is exact for these."""
    case = dense_case([511], group=4, size=16)
    case.query.zero_()
    for values in (case.v_cache, case.v_new):
        values.copy_(torch.arange(16.0).expand_as(values))
    assert torch.equal(run_dense(library, case)[0], torch.arange(16.0).expand(4, 16))


# ---- Memory


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [3, 600])
def test_attention_writes_nothing_outside_its_buffers(library: KernelLibrary, dtype: torch.dtype, m: int) -> None:
    """Nothing is written outside of a buffer; a workspace needs no more than it reports, and no initial content."""
    case, memory = dense_case([m - 1, -1], group=3, kv_heads=2, size=24, dtype=dtype), Guarded(library.device_type)
    expected = run_dense(library, case)
    tensors = {name: memory.copy(name, value) for name, value in case.dense_arguments().items()}
    tensors["output"] = memory.empty("output", tuple(case.query.shape), dtype)
    params = struct_of(DENSE_ATTENTION)(
        dtype=DTYPES.index(dtype), batch=2, heads=6, kv_heads=2, head_size=24, capacity=case.k_cache.shape[2],
        **{name: value.data_ptr() for name, value in tensors.items()},
    )  # fmt: skip
    needed = library.workspace_bytes("kvc_dense_attention", params)
    workspace = memory.empty("workspace", (needed,), torch.uint8).fill_(0x7F)
    library.call("kvc_dense_attention", params, workspace.data_ptr(), needed)
    if library.device_type == "cuda":
        torch.cuda.synchronize()
    memory.check()
    assert torch.equal(tensors["output"].cpu(), expected)
