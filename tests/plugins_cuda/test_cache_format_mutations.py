"""Mistakes about cache formats in the kernels of dense attention do not pass its tests."""

from __future__ import annotations

import pytest
import torch

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.formats import StoredStep
from tests.plugins_cuda.mutants import CALLED, RARELY_INLINED, Mutants, Mutation
from tests.plugins_cuda.test_cache_formats import check_dense, check_large_number, check_scaled_query, dense_case
from tests.stored_tables import FORMATS

pytestmark = pytest.mark.slow

STORED, PAIRS = "kernels/stored_vector.cuh", "kernels/code_pairs.cuh"
TENSOR_CORE, FMA, APPEND = "kernels/attention_tensor_core.cuh", "kernels/attention_fma.cuh", "kernels/append.cuh"
MUTATIONS = (
    Mutation("control", STORED, "(bits & 0x7fffu) == 0 ?", "0 == (bits & 0x7fffu) ?"),
    Mutation("a_scale_may_be_0", STORED, "(bits & 0x7fffu) == 0 ?", "false ?"),
    Mutation("a_scale_may_be_minus_0", STORED, "(bits & 0x7fffu) == 0 ?", "bits == 0 ?"),
    Mutation("a_scale_may_be_infinite", STORED, "half_bits(fminf(wanted, kLargestHalf))", "half_bits(wanted)"),
    Mutation("codes_are_cut", STORED, "rintf(__fdiv_rn(distance, scale))", "truncf(__fdiv_rn(distance, scale))"),
    Mutation("codes_are_products", STORED, "__fdiv_rn(distance, scale)", "distance * (1.0f / scale)"),
    Mutation("powers_are_one_too_small", STORED, "+ 0x1fffffu) >> 23) - 8", "+ 0x1fffffu) >> 23) - 9"),
    Mutation("powers_are_one_too_large", STORED, "+ 0x1fffffu) >> 23) - 8", "+ 0x3fffffu) >> 23) - 8"),
    Mutation(
        "the_exponent_of_zeros_is_0",
        STORED,
        "min(max(carried, 0), 254) : kExponentBias",
        "min(max(carried, 0), 254) : 0",
    ),
    Mutation("fp8_rounds_half_up", STORED, "0x7ffffu + (magnitude >> 20 & 1u)", "0x80000u"),
    Mutation("fp8_has_no_subnormal_numbers", STORED, "magnitude < 0x3c800000u", "magnitude == 0"),
    Mutation("a_minimum_may_be_minus_0", STORED, "(made.minimum & 0x7fffu) == 0 ?", "false ?"),
    Mutation("minus_0_counts", STORED, "x = x == 0.0f ? 0.0f : x;", ""),
    Mutation("only_the_first_group_counts", STORED, "to.groups > 1", "false"),
    Mutation("infinity_is_finite", STORED, "!(fabsf(x) < INFINITY)", "x != x"),
    Mutation("one_lane_is_lost", STORED, "__any_sync(kFullWarp, inside && lost) != 0", "inside && lost"),
    Mutation(
        "nibbles_change_places",
        STORED,
        "static_cast<uint32_t>(codes[i]) << 4 * i",
        "static_cast<uint32_t>(codes[i]) << 4 * (i ^ 1)",
    ),
    Mutation(
        "minima_are_scales",
        STORED,
        "memcpy(&minimum, table.minima + number",
        "memcpy(&minimum, static_cast<const half_t*>(table.scales) + number",
    ),
    Mutation("groups_of_tokens_overlap", STORED, "slot * table.groups + group", "slot + group"),
    Mutation("the_sign_bit_weighs_nothing", PAIRS, "(spread & 0x00800080u) | kInteger<T>", "kInteger<T>"),
    Mutation("the_sign_of_fp8_is_lost", PAIRS, "extended << 4 & 0x87f087f0u", "extended << 4 & 0x07f007f0u"),
    Mutation("fp8_pairs_are_not_scaled", PAIRS, "0x87f087f0u, 0x7b807b80u", "0x87f087f0u, 0x3f803f80u"),
    Mutation("bytes_of_keys_have_no_sign", PAIRS, "codes ^ 0x80808080u", "codes"),
    Mutation("queries_keep_their_order", PAIRS, "__byte_perm(channels.x, channels.z, 0x5410)", "channels.x"),
    Mutation("the_minimum_is_left_out", TENSOR_CORE, " + query[e] * minimum;", ";"),
    Mutation("sums_of_groups_run_on", TENSOR_CORE, "even[e] = odd[e] = 0.0f;", ""),
    Mutation(
        "scales_are_of_the_other_token",
        TENSOR_CORE,
        "factor_of<kKeys>(key_numbers_[i / 2][0])",
        "factor_of<kKeys>(key_numbers_[1 - i / 2][0])",
    ),
    Mutation("weights_are_not_scaled", TENSOR_CORE, "a *= factor_of<kValues>(numbers);", ""),
    Mutation("lower_numbers_of_a_query_do_not_count", TENSOR_CORE, "fabsf(__uint_as_float(pair << 16))", "0.0f"),
    Mutation("upper_numbers_of_a_query_do_not_count", TENSOR_CORE, "fabsf(__uint_as_float(pair)))", "0.0f)"),
    Mutation("lanes_scale_for_themselves", TENSOR_CORE, "__shfl_xor_sync(kFullWarp, largest, 2)", "largest"),
    Mutation(
        "powers_of_small_queries_overflow",
        TENSOR_CORE,
        "__float_as_uint(largest) >> 23, 24u)",
        "__float_as_uint(largest) >> 23, 0u)",
    ),
    Mutation("queries_are_twice_as_large", TENSOR_CORE, "(269 - exponent) << 23", "(270 - exponent) << 23"),
    Mutation(
        "heads_have_one_power",
        TENSOR_CORE,
        "__shfl_sync(kFullWarp, inverse, 8 * t_ + 4)",
        "__shfl_sync(kFullWarp, inverse, 8 * t_)",
    ),
    Mutation("offsets_are_not_rescaled", TENSOR_CORE, "offsets_[group][0] *= corrections[0];", ""),
    Mutation("halves_are_not_exchanged", TENSOR_CORE, "upper ? other : unit", "unit"),
    Mutation("a_block_has_one_scale", TENSOR_CORE, "i < 2 ? lower : upper", "lower"),
    Mutation(
        "numbers_are_those_of_the_first_tile",
        TENSOR_CORE,
        "rows.slot(first + group_ + 8 * half), group)",
        "rows.slot(rows.first + group_ + 8 * half), group)",
    ),
    Mutation("every_channel_is_of_group_0", FMA, "min(channel(i) / kGroupChannels, table.groups - 1)", "0"),
    Mutation("the_value_is_the_key", APPEND, "store_shared_vector(of_warp(warp),", "store_shared_vector(key,"),
)
MUTANTS = Mutants("src/dense_attention.cu", MUTATIONS, RARELY_INLINED, others=CALLED)


def check(library: KernelLibrary) -> None:
    """Caches and outputs in every format: of groups and of one, of zeros, small, large and infinite numbers.

    And queries that fp16 does not hold.
    """
    library.set_schedule("shuffled", seed=8)
    for power in (-120, 20):  # below 2^-103 heads have one power of two
        check_scaled_query(library, power)
    for channel in (0, 1):
        check_large_number(library, "fp8", channel)
    for form in FORMATS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            case = dense_case([250, 20, 3], group=2, kv_heads=1, size=64 if dtype != torch.float16 else 96, dtype=dtype)
            case.k_new[1, 0, :40] = torch.tensor([0.0, -0.0, 1e-7, -1e-5, 0.25, -2.0, 448.0, 449.0]).repeat(5)
            case.v_new[1, 0] = case.k_new[1, 0].neg()
            case.k_new[2], case.v_new[2, 0, :32] = 0.0, -0.0
            case.v_new[0].abs_()
            case.v_new[0, 0, 7] = -1e-9
            check_dense(library, StoredStep(case, form))
        case = dense_case([9, 9], group=1, kv_heads=1, size=64)
        case.k_new[0, 0, 3] = float("inf")
        case.v_new[1] = torch.linspace(-1, 1, 64) * 3e38
        step = float(torch.tensor(0.1).half())
        case.k_new[1, 0] = step * torch.cat([torch.arange(63) + 0.5, torch.tensor([127.0])])  # halves of a step
        found = StoredStep(case, form)
        stored = found.run(library)
        for name, expected in found.expected().items():
            assert torch.equal(stored[name].view(torch.int8), expected.view(torch.int8)), name


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_is_noticed(mutation: Mutation) -> None:
    MUTANTS.check_noticed(mutation, check)
