"""Mistakes about fp8 bounds in the kernels of hybrid attention do not pass its tests."""

from __future__ import annotations

import pytest
import torch

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.cases import step_case
from tests.plugins_cuda.checks import check_hybrid
from tests.plugins_cuda.mutants import RARELY_INLINED, Mutants, Mutation

pytestmark = pytest.mark.slow

FP8, TABLE, PREPARE = "kernels/fp8.cuh", "kernels/bound_table.cuh", "kernels/prepare_step.cuh"
TENSOR_CORE = "kernels/page_scores_tensor_core.cuh"
MUTATIONS = (
    Mutation("control", FP8, "steps < 0.0f ?", "0.0f > steps ?"),
    Mutation("fp8_is_rounded_to_nearest", FP8, "ceilf(number *", "rintf(number *"),
    Mutation("fp8_is_rounded_towards_zero", FP8, "ceilf(number *", "truncf(number *"),
    Mutation("fp8_is_rounded_away_from_zero", FP8, "ceilf(number *", "ceilf(fabsf(number) *"),
    Mutation("fp8_has_no_subnormal_numbers", FP8, "max(own, kLowestExponent)", "own"),
    Mutation("fp8_keeps_the_sign_of_zero", FP8, "steps < 0.0f ?", "number < 0.0f ?"),
    Mutation(
        "even_and_odd_pages_change_places",
        TENSOR_CORE,
        "product == 0 ? bounds << 8 : bounds",
        "product != 0 ? bounds << 8 : bounds",
    ),
    Mutation("every_page_is_an_even_one", TENSOR_CORE, "product == 0 ? bounds << 8 : bounds", "bounds << 8"),
    Mutation(
        "pages_of_one_product_are_neighbours",
        TENSOR_CORE,
        "sums[i % kProducts][2 * half + i / kProducts]",
        "sums[i * kProducts / kLanePages][2 * half + i % 2]",
    ),
    Mutation("spans_are_units", TENSOR_CORE, "own_page + span * kSpanPages", "own_page + span * kUnitPages"),
    Mutation(
        "lanes_give_rows_of_a_unit",
        TENSOR_CORE,
        "lane_index() / kStepChannels * kSpanPages",
        "lane_index() / kStepChannels * kUnitPages",
    ),
    Mutation("the_lower_byte_counts", FP8, "pair & 0xff00ff00u", "pair"),
    Mutation("the_sign_is_lost", FP8, "(pair & 0x80008000u) | ", ""),
    Mutation("the_exponent_is_not_moved", FP8, "platform::multiply_pairs(T{}, scaled, kTwoTo112)", "scaled"),
    Mutation(
        "fp8_is_stored_as_the_caches_type",
        PREPARE,
        "bounds(params.bounds, params.fp8_bounds)",
        "bounds(params.bounds, false)",
    ),
    Mutation("fp8_starts_where_the_caches_type_would", TABLE, "is_fp8_ ? sizeof(fp8_t) : sizeof(T)", "sizeof(T)"),
)
MUTANTS = Mutants("src/hybrid_attention.cu", MUTATIONS, RARELY_INLINED)


def check(library: KernelLibrary) -> None:
    """The reference's results for every cache, and heads of a quarter, a half and all of a product's rows; of keys that
    are rounded, subnormal, zero, or beyond the largest number, as the first of a page."""
    steps = [
        step_case(
            lengths=(299, 70), heads=heads, kv_heads=1, size=40, capacity=301, page=3, top_r=11, top_k=20, dtype=dtype,
            seed=20 + heads, fp8=True,
        )
        for dtype, heads in ((torch.float16, 4), (torch.float16, 9), (torch.bfloat16, 7), (torch.bfloat16, 16))
    ]  # fmt: skip
    steps.append(step_case(lengths=(198, 3), capacity=201, page=3, top_r=11, seed=23, fp8=True))
    steps[-1].k_new[:, :, :6] = torch.tensor([0.0, 1e-5, -1e-7, 1e6, -1e6, 3e-5])
    library.set_schedule("shuffled", seed=8)
    for step in steps:
        assert check_hybrid(library, step).near_ties == 0, "these inputs have one right choice"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_is_noticed(mutation: Mutation) -> None:
    MUTANTS.check_noticed(mutation, check)
