"""A step that clusters take whole, with any number of blocks, has the bits of one launch after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvc_trt.kernels.library import SCHEDULES, KernelLibrary
from kvc_trt.kernels.switches import CLUSTER_STEP, CLUSTERS, RING
from kvc_trt.models.presets import load_preset
from tests.plugins_cuda.cases import FP8, StepCase, step_case
from tests.plugins_cuda.test_launch_limits import Call, resolved
from tests.plugins_cuda.test_score_and_select import (
    APART,
    DTYPES,
    FUSED,
    WHOLE,
    apart_results,
    check_bits,
    later,
    launches,
    pages_case,
    results,
    rows_case,
)

__all__ = ["later"]
MODEL = load_preset("llama3.1-8b").config
BLOCKS = {8: 1, 4: 17, 2: 34, 1: 67}
"""Fewest clusters of that many blocks, on 132 multiprocessors."""


def blocks_of(library: KernelLibrary, case: StepCase) -> int:
    """Blocks of a cluster of the one launch of a step."""
    arguments = case.to("cpu").arguments()
    (launch,) = library.launches_of(lambda: library.hybrid_attention(**arguments))
    assert launch.grid[0] == launch.cluster_blocks
    return launch.cluster_blocks


def check_whole(library: KernelLibrary, case: StepCase, blocks: int) -> None:
    expected = apart_results(library, case)
    assert blocks_of(library, case) == blocks
    check_bits(library, case, WHOLE, expected)


def heads_case(blocks: int, pages: int, **changes: Any) -> StepCase:
    """One row of as many KV heads as get clusters of `blocks`; pages of one token each."""
    kv_heads = BLOCKS[blocks]
    return pages_case(pages, kv_heads=kv_heads, heads=kv_heads * changes.pop("group", 1), **changes)


@pytest.mark.parametrize("blocks", BLOCKS)
@FP8
def test_any_number_of_blocks_has_the_same_bits(later: KernelLibrary, fp8: bool, blocks: int) -> None:
    """Rows of one split and of several, fewer pages than blocks have, and more than threads rank at a time."""
    for pages, top_k in ((3, 2), (130, 20), (300, 256), (600, 257), (1100, 400)):
        check_whole(later, heads_case(blocks, pages, top_k=top_k, seed=pages, fp8=fp8), blocks)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("group", [3, 4, 5, 8])
def test_every_group_attends_in_any_number_of_blocks(later: KernelLibrary, group: int, blocks: int) -> None:
    for top_k in (100, 300):
        check_whole(later, heads_case(blocks, 330, top_k=top_k, group=group, seed=group), blocks)


@pytest.mark.parametrize("size", [16, 24, 64, 72, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_size_attends_in_clusters(later: KernelLibrary, dtype: torch.dtype, size: int) -> None:
    sizes = {"heads": 8, "size": size, "page": 3, "top_r": 11, "capacity": 601, "dtype": dtype}
    for top_k in (190, 300):
        check_whole(later, step_case(lengths=(600, 500, 40), top_k=top_k, **sizes), 8)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("recent", [0, 7])
def test_rows_of_every_kind_in_one_batch(later: KernelLibrary, blocks: int, recent: int) -> None:
    """Rows that select, that read all their entries in one split or in three, and that take no part."""
    lengths = (400, 399, 299, -1, 401, 8, 20, 200)
    sizes = {"heads": 4, "size": 40, "page": 3, "top_r": 19, "top_k": 20, "capacity": 401, "dtype": torch.float16}
    kv_heads = -(-BLOCKS[blocks] // len(lengths))
    sizes |= {"kv_heads": kv_heads, "heads": 2 * kv_heads, "token_budget": 310, "recent": recent}
    check_whole(later, step_case(lengths=lengths, **sizes), blocks)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_schedules_agree(later: KernelLibrary, blocks: int) -> None:
    for top_k in (200, 300):
        case = heads_case(blocks, 400, top_k=top_k, group=2, ties=True)
        found = []
        for schedule in SCHEDULES:
            later.set_schedule(schedule, seed=7)
            found.append(results(later, case))
        later.set_schedule(SCHEDULES[0])
        for name, tensor in found[0].items():
            assert all(torch.equal(tensor, other[name]) for other in found[1:]), name


def test_the_ring_changes_no_bit(later: KernelLibrary) -> None:
    case = pages_case(600, top_k=256, heads=2)
    expected = results(later, case)
    with RING.off(later):
        check_bits(later, case, WHOLE, expected)


# ---- Where a step is one launch


@pytest.mark.parametrize(
    ("architecture", "blocks"),
    [
        ("sm_80", {}),
        ("sm_90a", {1: 8, 2: 8, 3: 4, 4: 4, 5: 2, 8: 2, 9: 1, 16: 1}),
        ("sm_100", {1: 8, 2: 8, 3: 4, 4: 4, 5: 2, 9: 2, 10: 1, 18: 1}),
    ],
)
def test_more_rows_have_fewer_blocks(later: KernelLibrary, architecture: str, blocks: dict[int, int]) -> None:
    """Every block has a multiprocessor to itself: 132 or 148 of them, for eight KV heads."""
    later.set_device(architecture)
    for batch, expected in blocks.items():
        assert blocks_of(later, rows_case(batch)) == expected, batch
    assert launches(later, rows_case(max(blocks, default=0) + 1)) == APART


@pytest.mark.parametrize(
    ("fp8", "largest"),
    [(False, {256: 16, 512: 16, 1024: 4, 2048: 2, 4096: 0}), (True, {256: 16, 512: 16, 1024: 8, 2048: 4, 4096: 2})],
)
def test_the_largest_batch_of_each_budget(later: KernelLibrary, fp8: bool, largest: dict[int, int]) -> None:
    """Fewer blocks each stage more bounds, until they do not fit; docs/kernels/decode-selection.md has these."""
    for budget, most in largest.items():
        parameters = replace(resolved("rocketkv", MODEL, 32768, budget), fp8_bounds=fp8)
        for batch in (1, 2, 3, 4, 5, 8, 9, 16, 17):
            step = Call("kvc_hybrid_attention", MODEL, parameters, batch).launches(later)
            assert (step[0].name == b"cluster_step") == (batch <= most), (budget, batch)


def test_clusters_that_would_wait_for_room_have_fewer_blocks(later: KernelLibrary) -> None:
    try:
        later.set_active_clusters(15)
        assert blocks_of(later, rows_case(2, top_k=33)) == 1, "clusters of 4 and of 2 have the same answer"
        later.set_active_clusters(16)
        assert blocks_of(later, rows_case(2, top_k=37)) == 8
    finally:
        later.set_active_clusters(0)


def test_other_sizes_keep_their_launches(later: KernelLibrary) -> None:
    assert launches(later, rows_case(1, size=128)) == WHOLE
    assert launches(later, rows_case(1, size=136)) == FUSED, "the attention is compiled for 128 channels"
    assert launches(later, rows_case(1, heads=72)) == FUSED, "and for groups of eight"
    assert launches(later, rows_case(1, dense_until=17)) == FUSED, "rows may read more than the budget"
    assert launches(later, rows_case(1, dtype=torch.float32)) == APART
    assert launches(later, pages_case(8192, top_k=30)) == WHOLE
    assert launches(later, pages_case(8193, top_k=30)) == APART, "a thread selects among at most 32 pages"
    assert launches(later, pages_case(8192, top_k=30, size=64, top_r=64)) == APART, "staged bounds do not fit"


@pytest.mark.parametrize("switch", [CLUSTER_STEP, CLUSTERS], ids=lambda switch: switch.name)
def test_a_switch_turns_whole_steps_off(later: KernelLibrary, switch: Any) -> None:
    with switch.off(later):
        assert launches(later, rows_case(1)) == (FUSED if switch is CLUSTER_STEP else APART)
    assert launches(later, rows_case(1)) == WHOLE
