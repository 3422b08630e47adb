"""A barrier, a tie or a tail that is wrong in the kernels of hybrid attention does not pass its tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.cases import step_case, without_pages
from tests.plugins_cuda.checks import check_hybrid
from tests.plugins_cuda.mutants import RARELY_INLINED, Mutants, Mutation
from tests.plugins_cuda.test_rotated_attention import check_hybrid as check_rotated
from tests.plugins_cuda.test_rotated_attention import unrotated

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CHANNELS, SCORES = "kernels/score_channels.cuh", "kernels/page_scores.cuh"
PREPARE, PREPARED = "kernels/prepare_step.cuh", "kernels/prepared_query.cuh"
FMA, TENSOR_CORE = "kernels/page_scores_fma.cuh", "kernels/page_scores_tensor_core.cuh"
CHUNK = "kernels/scored_chunk.cuh"
STAGED, SELECT, APPEND = "kernels/staged_bounds.cuh", "kernels/select_tokens.cuh", "kernels/append.cuh"
TOKEN = "kernels/new_token.cuh"
STATISTICS, SHARES = "kernels/page_statistics.cuh", "kernels/page_shares.cuh"
RADIX, EMIT = "kernels/radix_select.cuh", "kernels/emit_selected.cuh"
BARRIER = "__syncthreads();"


def without_barrier(name: str, file: str, context: str) -> Mutation:
    """`context` occurs in `file` and has one barrier."""
    return Mutation(f"no_barrier_{name}", file, context, context.replace(BARRIER, ""))


END = "params.page_size + 1}"
WAIT = "    wait_for_previous_launch();\n"
LENGTH = "    const AttendedRow row = attended_row(params.cache_lengths[blockIdx.y], params.limits);\n"
HEAD = "    const int64_t head = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;\n"
MUTATIONS = (
    Mutation("control", CHANNELS, "sum_ > 0.0f ?", "0.0f < sum_ ?"),
    Mutation("no_warp_barrier_before_channels_are_ranked", CHANNELS, "    __syncwarp();\n", ""),
    without_barrier("before_lists_are_searched", CHANNELS, BARRIER),
    Mutation("equal_channels_of_a_warp_share_a_place", CHANNELS, "return place + __popc", "return place + 0 * __popc"),
    Mutation("equal_channels_by_descending_index", CHANNELS, "first + i < warp ?", "first + i > warp ?"),
    Mutation("a_sum_of_zero_takes_the_maximum", CHANNELS, "sum_ > 0.0f ?", "sum_ >= 0.0f ?"),
    Mutation("temperature_of_all_channels", CHANNELS, "part / whole;", "whole / whole;"),
    without_barrier("after_the_choice", PREPARE, f"query);\n        {BARRIER}"),
    Mutation(
        "the_query_where_the_temperatures_are", PREPARED, "prepared + layout.factors", "prepared + layout.temperatures"
    ),
    Mutation("no_wait_for_the_copies", SCORES, "    copy_async_wait<0>();\n", ""),
    without_barrier("after_the_copies", SCORES, f"wait<0>();\n    {BARRIER}"),
    without_barrier("before_runs_are_added", FMA, f"{BARRIER}\n                write"),
    without_barrier("before_partials_are_written_again", FMA, f"chunk, page);\n                {BARRIER}"),
    Mutation("rows_start_where_they_are_aligned", STAGED, "i * to.row + shift", "i * to.row"),
    Mutation("no_rows_of_zeros", STAGED, "for_each_of(channels, to.rows,", "for_each_of(channels, channels,"),
    Mutation("some_rows_are_not_staged", STAGED, "quad += step_) {", "quad += 2 * step_) {"),
    Mutation("halves_of_a_step_change_places", TENSOR_CORE, "word / 2 * 8", "(1 - word / 2) * 8"),
    Mutation(
        "channels_of_a_pair_change_places",
        TENSOR_CORE,
        "(head, channel), query.factor(head, channel + 1)",
        "(head, channel + 1), query.factor(head, channel)",
    ),
    Mutation(
        "a_small_group_writes_one_span",
        TENSOR_CORE,
        "second ? other.value[i] : own[tile].value[i]",
        "own[tile].value[i]",
    ),
    Mutation("the_upper_half_of_a_large_group_twice", TENSOR_CORE, "group + half * kRows", "group"),
    Mutation(
        "half_of_a_step_twice", TENSOR_CORE, "start_of(lane_index() % kStepChannels)", "start_of(lane_index() % 8)"
    ),
    Mutation(
        "rows_of_fp32_are_aligned",
        STAGED,
        "stored_pages(1, 1, sizeof(Bound), kIsFp8<Bound>) % kVectorWidth<Bound> == 0",
        "true",
        alone=True,
    ),
    Mutation("every_warp_scores_the_same_pages", TENSOR_CORE, "page = warp_index() * kTilePages", "page = 0"),
    Mutation(
        "the_last_aligned_vector_is_not_staged",
        STAGED,
        "place < count ? channels : 0;\n        quads",
        "place + kWidth <= count ? channels : 0;\n        quads",
    ),
    Mutation("the_last_vector_is_not_staged", STAGED, "place < shift + count", "place + kWidth <= shift + count"),
    Mutation("minimum_for_maximum", CHANNELS, "row < head_size ? value : -value", "value"),
    Mutation("pages_past_the_end_count", CHUNK, "scores[tile][i] = minus_infinity();", "scores[tile][i] = 9.0f;"),
    Mutation("a_partial_page_counts_as_a_full_one", STATISTICS, "page == last ? in_last : in_others", "in_others"),
    Mutation("pages_of_equal_weight_in_the_softmax", STATISTICS, "tokens[tile][i] * expf", "expf"),
    Mutation(
        "a_unit_of_minus_infinities_is_nan", STATISTICS, "maximum == minus_infinity() ? 0.0f : maximum", "maximum"
    ),
    Mutation("the_first_parts_are_lost", STATISTICS, "step < end) {", "step < end && i > 0) {"),
    Mutation("sums_of_units_as_they_are", STATISTICS, "held[i].sum * expf(held[i].maximum - base)", "held[i].sum"),
    Mutation("the_last_unit_does_not_count", STATISTICS, "(pages + kUnitPages - 1) / kUnitPages", "pages / kUnitPages"),
    without_barrier("after_the_statistics_of_warps", STATISTICS, f"{BARRIER}\n    const int thread"),
    without_barrier("after_the_softmax", STATISTICS, f"all.sum(maximum)}};\n    }}\n    {BARRIER}"),
    Mutation(
        "a_partial_page_gives_as_many_as_a_full_one", SHARES, "min(max(left, 0), page_size)", "left < 1 ? 0 : page_size"
    ),
    Mutation("last_tokens_compete_too", SELECT, "row.compared(params.limits),", "row.length,"),
    Mutation(
        "last_tokens_are_not_written",
        SELECT,
        "        lists.write_recent(row,",
        "        if (false) lists.write_recent(row,",
    ),
    Mutation(
        "last_tokens_are_beyond_the_quota",
        SELECT,
        "select_in_registers<Keys::kPages>(pages, row.best(params.limits)",
        "select_in_registers<Keys::kPages>(pages, row.count",
    ),
    Mutation("shares_of_the_first_head_alone", SHARES, "exists ? sum : shares[j]", "first + i == 0 ? sum : shares[j]"),
    Mutation("heads_of_equal_sums", SHARES, " * head.scale;", ";"),
    Mutation("the_last_page_of_a_thread_is_lost", RADIX, "if (j < count) visit", "if (j + 1 < count) visit"),
    Mutation(
        "ties_of_a_thread_by_descending_index",
        EMIT,
        "__clz(static_cast<int32_t>(bits))",
        "32 - __ffs(static_cast<int32_t>(bits))",
    ),
    without_barrier("before_keys_in_memory_are_counted", SELECT, BARRIER),
    Mutation("the_last_page_is_not_selected", SELECT, END, END.replace(" + 1", "")),
    Mutation("nothing_past_the_end_of_selected", SELECT, "slot < width;", "slot < count;"),
    Mutation("bounds_are_not_raised", PREPARE, "    joined.raise(key);\n", ""),
    Mutation(
        "bounds_of_the_page_behind", PREPARE, "(row.length - 1) / params.page_size", "row.length / params.page_size"
    ),
    Mutation("prepare_step_does_not_wait_for_the_launch_before_it", PREPARE, WAIT, ""),
    Mutation("page_scores_does_not_wait_for_the_launch_before_it", SCORES, WAIT, ""),
    Mutation("select_tokens_waits_after_a_load", SELECT, WAIT + HEAD + LENGTH, HEAD + LENGTH + WAIT, alone=True),
    Mutation("select_tokens_does_not_wait_in_some_blocks", SELECT, WAIT, f"    if (blockIdx.x > 0)\n{WAIT}"),
    Mutation("minimum_of_the_key_itself", APPEND, "nan_max(negated_minimum, -key)", "nan_max(negated_minimum, key)"),
    Mutation("the_value_is_not_appended", APPEND, "value_ = value[channel_.number()];", ""),
    Mutation("both_halves_turn_the_same_way", TOKEN, "second ? sine : -sine", "sine"),
    Mutation("every_row_is_at_the_first_ones_position", TOKEN, "row * half", "0 * row * half"),
    Mutation("the_key_is_not_rotated", APPEND, "return channel_.rotated(key_);", "return key_.own;"),
    Mutation("the_rotated_query_is_not_written", PREPARE, "append.rotated_of(head)", "static_cast<T*>(nullptr)"),
)
MUTANTS = Mutants("src/hybrid_attention.cu", MUTATIONS, RARELY_INLINED)


def check(library: KernelLibrary) -> None:
    """The reference's results: rows that select and rows that do not, ties of pages and of channels, pages at every
    alignment, a page's first token, a partial page; groups of one tile of heads and of two, of one half and of two."""
    steps = [
        step_case(
            lengths=(199, 64, 10), heads=4 if ties else 10, size=40, capacity=201, page=page, top_r=11, top_k=20,
            token_budget=16, dtype=dtype, ties=ties, distinct=2, seed=seed, opposite=ties,
        )
        for seed, (dtype, page, ties) in enumerate(
            ((torch.float16, 1, False), (torch.bfloat16, 4, True), (torch.float32, 3, False), (torch.float32, 5, True))
        )
    ]  # fmt: skip
    steps[1].query.sign_()
    last = step_case(lengths=(192, 176, 160), heads=8, size=40, capacity=201, page=16, top_r=11, top_k=70, seed=5)
    last.k_new.copy_(2 * last.query[:, ::4])  # one head looks at the last page, where this is the only token
    steps.append(last)
    steps.append(
        step_case(  # more rows than are staged at a time
            lengths=(399,), heads=9, kv_heads=1, size=128, capacity=400, page=2, top_r=90, dtype=torch.bfloat16, seed=7
        )
    )
    always = step_case(
        lengths=(199, 64), heads=8, capacity=201, page=4, top_r=11, top_k=20, token_budget=16, seed=11, recent=7
    )  # last tokens that are read in any case: whole pages and a part of one, of which one head would choose the last
    always.k_new.copy_(2 * always.query[:, ::4])
    steps.append(always)
    steps.append(without_pages(step_case(lengths=(199,), capacity=201, page=3, top_r=11, token_budget=16, seed=6), 9))
    many = step_case(
        lengths=(4199,), heads=1, kv_heads=1, size=16, capacity=4200, page=1, top_r=1, top_k=20, token_budget=16, seed=9
    )  # more pages than keys fit into registers
    steps.append(many)
    library.set_schedule("shuffled", seed=8)
    for step in steps:
        compared = check_hybrid(library, step)
        assert compared.near_ties == 0, "these inputs have one right choice"
    check_rotated(library, unrotated(steps[0]))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_is_noticed(mutation: Mutation) -> None:
    MUTANTS.check_noticed(mutation, check)


def test_a_mutation_removes_every_barrier() -> None:
    """Every barrier of the headers is removed by one of the mutations."""
    for file in (CHANNELS, PREPARE, SCORES, FMA, TENSOR_CORE, CHUNK, STATISTICS, SELECT):
        there = (ROOT / "plugins_cuda" / file).read_text().count("__syncthreads();")
        removed = sum(BARRIER in mutation.right for mutation in MUTATIONS if mutation.file == file)
        assert there == removed, f"{file} has {there} barriers, {removed} are removed"
