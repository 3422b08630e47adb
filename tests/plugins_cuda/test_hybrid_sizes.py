"""kvc_hybrid_attention over the sizes that it takes: pages, groups, heads, lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.cases import DTYPES, FP8, StepCase, bounds_of, step_case
from tests.plugins_cuda.checks import assert_same_bits, check_hybrid
from tests.plugins_cuda.hybrid_steps import GROUPS, run, selected_tokens, small, state_of


@pytest.mark.pairwise
@pytest.mark.parametrize("top_r", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 8, 16])
@pytest.mark.parametrize("pages", [1, 7, 8, 9, 15, 16, 17, 24, 120, 121, 127, 128, 129, 136, 145, 255, 256])
def test_a_partly_filled_last_tile_of_pages_equals_the_reference(
    library: KernelLibrary, pages: int, heads: int, dtype: torch.dtype, top_r: int
) -> None:
    """Around units of 8 pages, a warp's 16, a block's 128; a last step of 16 channels with few of them and many."""
    check_hybrid(library, last_tile(pages, heads, dtype, top_r))


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("top_r", [1, 16, 17, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [4, 8, 16])
@pytest.mark.parametrize("pages", [1, 2, 15, 16, 17, 31, 32, 33, 48, 255, 256, 257, 273, 512, 513])
def test_a_partly_filled_last_tile_of_fp8_pages_equals_the_reference(
    library: KernelLibrary, pages: int, heads: int, dtype: torch.dtype, top_r: int
) -> None:
    """Around spans of 16 pages, a warp's 32, a block's 256."""
    check_hybrid(library, last_tile(pages, heads, dtype, top_r, fp8=True))


def last_tile(pages: int, heads: int, dtype: torch.dtype, top_r: int, *, fp8: bool = False) -> StepCase:
    """Return a row whose pages are all there are, and one with half of them."""
    return step_case(
        lengths=(2 * pages - 1, pages), heads=heads, kv_heads=1, size=40, capacity=2 * pages, page=2, top_r=top_r,
        top_k=pages, token_budget=0, dtype=dtype, seed=pages, fp8=fp8,
    )  # fmt: skip


@pytest.mark.pairwise
@pytest.mark.parametrize("shift", range(8))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@FP8
def test_equal_pages_score_equally_wherever_they_are(
    library: KernelLibrary, fp8: bool, dtype: torch.dtype, shift: int
) -> None:
    """All pages are copies of one, for any lane, unit, warp and block."""
    pages = 520 + shift
    case = step_case(
        lengths=(2 * pages - 2,), heads=6, kv_heads=1, size=24, capacity=2 * pages, page=2, top_r=19, top_k=200,
        token_budget=0, dtype=dtype, seed=shift, fp8=fp8,
    )  # fmt: skip
    key = case.k_cache[:, :, :1].clone()
    case.k_cache[:, :, :-2] = key
    case.k_new.copy_(key[:, :, 0])
    bounds = bounds_of(case.k_cache, case.cache_lengths, 2, fp8=fp8)
    assert selected_tokens(library, replace(case, bounds=bounds)) == [[list(range(200))]]


@pytest.mark.pairwise
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e4])
@pytest.mark.parametrize("pages", [1, 7, 8, 9, 15, 16, 17, 127, 128, 129])
@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_pages_past_the_last_slot_are_neither_scored_nor_changed(
    library: KernelLibrary, fp8: bool, dtype: torch.dtype, pages: int, poison: float
) -> None:
    """Whatever their bounds are: those of a full row, and of one whose last pages are empty."""
    case = step_case(
        lengths=(3 * pages - 1, 2 * pages), size=24, capacity=3 * pages, page=3, top_r=7, top_k=2 * pages,
        token_budget=0, dtype=dtype, seed=pages, fp8=fp8,
    )  # fmt: skip
    stored, multiple = case.bounds.shape[3], 16 if fp8 else 1 if dtype == torch.float32 else 8
    assert stored == -(-pages // multiple) * multiple
    after, output, selected = run(library, case)
    case.bounds[..., pages:] = {torch.nan: 0x7F, torch.inf: 0x7C, 1e4: 0x70}[poison] if fp8 else poison
    poisoned, same_output, same_selected = run(library, case)
    assert torch.equal(selected, same_selected)
    assert_same_bits(output, same_output, "output")
    assert_same_bits(poisoned.bounds[..., :pages], after.bounds[..., :pages], "bounds")
    assert_same_bits(poisoned.bounds[..., pages:], case.bounds[..., pages:], "bounds past the last slot")


@pytest.mark.pairwise
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_every_group_size_equals_the_reference(
    library: KernelLibrary, fp8: bool, group: int, dtype: torch.dtype
) -> None:
    check_hybrid(library, small(heads=2 * group, dtype=dtype, fp8=fp8))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", range(16, 257, 8))
@FP8
def test_every_head_size_equals_the_reference(library: KernelLibrary, fp8: bool, size: int, dtype: torch.dtype) -> None:
    """Covers all channels chosen, about half of them, and few."""
    top_r = {torch.bfloat16: size, torch.float16: size // 2 + 1, torch.float32: 3}[dtype]
    check_hybrid(library, small(size=size, top_r=top_r, dtype=dtype, lengths=(100, 40), fp8=fp8))


@pytest.mark.parametrize(
    ("capacity", "page"), [(2048, 1), (2049, 1), (4096, 1), (4097, 1), (16384, 1), (16385, 1), (40000, 2)]
)
def test_many_pages_equal_the_reference(library: KernelLibrary, capacity: int, page: int) -> None:
    """The selection's keys are in registers, 4 or 8 of each thread, then in shared memory, then in the workspace."""
    case = step_case(
        lengths=(capacity - 1, capacity // 3), heads=2, kv_heads=1, size=16, capacity=capacity, page=page, top_r=4,
        top_k=700, token_budget=100, dtype=torch.float16,
    )  # fmt: skip
    check_hybrid(library, case)
    for fp8 in (False, True):
        ties = step_case(
            lengths=(capacity - 1,), heads=1, kv_heads=1, size=16, capacity=capacity, page=page, top_r=16, top_k=700,
            token_budget=100, ties=True, distinct=3, fp8=fp8,
        )  # fmt: skip
        assert check_hybrid(library, ties).near_ties == 0


@pytest.mark.parametrize("page", [50, 99, 100, 101, 1000])
@FP8
def test_few_large_pages_equal_the_reference(library: KernelLibrary, fp8: bool, page: int) -> None:
    check_hybrid(library, small(page=page, fp8=fp8))


def test_one_page_of_all_slots_is_the_same_for_any_page_size(library: KernelLibrary) -> None:
    """One page that holds all slots: its bounds are the same whatever its size."""
    case = small(page=101)
    _, output, selected = run(library, case)
    _, same, chosen = run(library, replace(case, page_size=2**31 - 1))
    assert torch.equal(selected, chosen)
    assert torch.equal(output, same)


@pytest.mark.parametrize("dtype", DTYPES)
def test_leaving_out_the_selected_list_changes_no_result(library: KernelLibrary, dtype: torch.dtype) -> None:
    case = small(dtype=dtype)
    after, output, _ = run(library, case)
    moved = case.to(library.device_type)
    same, selected = library.hybrid_attention(**moved.arguments(), with_selected=False)
    assert selected is None
    assert torch.equal(output, same.cpu())
    for name in state_of(case):
        assert_same_bits(getattr(after, name), getattr(moved, name).cpu(), name)


def test_the_selected_list_is_written_to_its_end(library: KernelLibrary) -> None:
    case = small(token_budget=80, top_k=16)
    _, _, selected = run(library, case)
    assert selected.shape == (3, 2, 80)
    assert [(row >= 0).sum(-1).tolist() for row in selected] == [[16, 16], [65, 65], [11, 11]]
    assert bool((selected[2, :, 11:] == -1).all())


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [16, 400])
def test_one_block_for_several_splits_has_the_bits_of_dense_attention(
    scheduled_library: KernelLibrary, top_k: int, dtype: torch.dtype
) -> None:
    """Blocks are launched for the splits of a sparse row. The dense operation has one for each split, and its bits."""
    case = small(lengths=(700, 300, 699), capacity=701, top_k=top_k, token_budget=701, dtype=dtype)
    _, output, selected = run(scheduled_library, case)
    dense = scheduled_library.dense_attention(**case.to(scheduled_library.device_type).dense_arguments()).cpu()
    assert torch.equal(output, dense)
    assert torch.equal(selected[0], torch.arange(701).expand(2, -1).int())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_list_longer_than_a_block_holds_equals_the_reference(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Splits of 384 tokens, whose list a block reads in parts of 256."""
    case = step_case(
        lengths=[16500, 16400], heads=2, kv_heads=1, size=16, page=64, top_k=16385, token_budget=0, dtype=dtype
    )  # fmt: skip
    assert not check_hybrid(library, case).near_ties
