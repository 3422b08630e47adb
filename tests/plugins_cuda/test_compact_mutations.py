"""A barrier, a tie or a tail that is wrong in the compaction's kernels is noticed.

Kernels run under the race detector, so that a missing barrier shows even where every schedule gives the same result.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import SCHEDULES, CompactResult, KernelLibrary
from tests.plugins_cuda.cases import compact_case
from tests.plugins_cuda.mutants import Mutants, Mutation
from tests.plugins_cuda.redzones import compact_between_redzones
from tests.plugins_cuda.test_compact import assert_equal_results

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RADIX, EMIT, POOL = "kernels/radix_select.cuh", "kernels/emit_selected.cuh", "kernels/pool_select.cuh"
GATHER, MOVE = "kernels/gather_cache.cuh", "kernels/move_in_place.cuh"
FP8 = "kernels/fp8.cuh"
BARRIER = "__syncthreads();\n"
LAST = "first + part < n ? first + part : n"
TIES_BEFORE = "warp ? storage[kWarps + other]"
SEGMENT_END = "min(first + layout.segment_slots, (page + 1) * layout.page_size)"
MUTATIONS = (
    Mutation("control", RADIX, "if (quota <= 0)", "if (quota < 1)"),
    Mutation("no_barrier_after_the_clearing", POOL, f"{BARRIER}    const auto keys_read", "const auto keys_read"),
    Mutation("no_barrier_before_the_copies_are_added", RADIX, f"{BARRIER}        add_up", "add_up"),
    Mutation("no_barrier_before_a_digit_is_taken", RADIX, f"{BARRIER}        const uint32_t", "const uint32_t"),
    Mutation("no_barrier_between_the_shares_of_warps", EMIT, f"{BARRIER}    static_assert", "static_assert"),
    Mutation("bins_are_compared_one_by_one", RADIX, "if (above < quota) {", "if (weights[j] < quota) {"),
    Mutation("all_ties", RADIX, "(other & mask) > key", "(other & mask) >= key"),
    Mutation("ties_by_descending_index", EMIT, f"other < {TIES_BEFORE}", f"other > {TIES_BEFORE}"),
    Mutation("the_last_candidate_is_lost", EMIT, f"{LAST};", f"{LAST} - 1;"),
    Mutation("no_barrier_in_the_pooling", POOL, f"values[j];\n        {BARRIER}", "values[j];\n"),
    Mutation("pooling_sees_the_window", POOL, "< votes_count ? pooling_key", "<= votes_count ? pooling_key"),
    Mutation("pooling_too_narrow", POOL, "while (covered < pool_kernel)", "while (covered < pool_kernel - 1)"),
    Mutation("no_barrier_before_the_bounds", GATHER, BARRIER, "\n"),
    Mutation("a_page_takes_slots_of_the_next", GATHER, SEGMENT_END, "first + layout.segment_slots"),
    Mutation("a_partial_page_takes_free_slots", GATHER, "min(end, head.length), extremes", "end, extremes"),
    Mutation("no_zeros_past_the_end", GATHER, "slot = max(first, head.length)", "slot = end"),
    Mutation("fp8_is_rounded_to_nearest", FP8, "ceilf(number *", "rintf(number *"),
    Mutation(
        "fp8_of_nan_is_the_lowest",
        FP8,
        "number = x < -lowest ? fmaxf(x, lowest) : -lowest",
        "number = fminf(fmaxf(x, lowest), -lowest)",
    ),
    Mutation("fp8_is_not_clamped", FP8, "number = x < -lowest ? fmaxf(x, lowest) : -lowest", "number = x"),
    Mutation(
        "fp8_is_written_as_the_caches_type",
        GATHER,
        "BoundTable<T>(params.bounds, params.fp8_bounds)",
        "BoundTable<T>(params.bounds, false)",
    ),
    Mutation("no_barrier_in_the_move", MOVE, BARRIER, "\n"),
)
MUTANTS = Mutants("src/compact.cu", MUTATIONS)


def check(library: KernelLibrary) -> None:
    """Every schedule gives the reference's results, out of place and in place. The scores tie exactly, so that the
    reference's choice is the only right one; the last candidate is chosen in one KV head and not in the other. For fp8
    the keys are scaled to what is rounded there, which changes no tie."""
    case = compact_case(
        lengths=[150, 7], heads=2, kv_heads=2, capacity=150, budget=120, pool=3, page=5, size=16, ties=True, seed=2
    )
    rounded = replace(case, k=case.k * 1.125, fp8_bounds=1)
    rounded.k[1, :, 0, :4] = torch.tensor([1e5, -1e5, math.nan, 1e-6])  # of a prompt that fits, so of no score
    for one in (case, rounded):
        expected = reference_ops.compute("compact", one.arguments())
        for order in SCHEDULES:
            library.set_schedule(order, seed=8)
            for in_place in (False, True):
                found = compact_between_redzones(library, one, with_bounds=True, in_place=in_place)
                assert_equal_results(CompactResult(**found), expected)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_is_noticed(mutation: Mutation) -> None:
    MUTANTS.check_noticed(mutation, check)


def test_a_mutation_removes_every_barrier() -> None:
    """Every barrier of the five headers is removed by one of the mutations."""
    for file in (RADIX, EMIT, POOL, GATHER, MOVE):
        there = (ROOT / "plugins_cuda" / file).read_text().count("__syncthreads();")
        removed = sum(BARRIER in mutation.right for mutation in MUTATIONS if mutation.file == file)
        assert there == removed, f"{file} has {there} barriers, {removed} are removed"
