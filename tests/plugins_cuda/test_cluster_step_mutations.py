"""A barrier, a tile or a block's part that is wrong in a cluster that attends does not pass its tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.cases import step_case
from tests.plugins_cuda.mutants import RARELY_INLINED, Mutants, Mutation
from tests.plugins_cuda.test_cluster_step import check_whole, heads_case
from tests.plugins_cuda.test_score_and_select import pages_case

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STEP, ATTENTION = "kernels/cluster_step.cuh", "kernels/cluster_attention.cuh"
SCORES, TENSOR_CORE = "kernels/score_and_select.cuh", "kernels/attention_tensor_core.cuh"
FRAGMENTS = "kernels/attention_fragments.cuh"
BARRIERS = ("__syncthreads();", "synchronize_cluster();", "results.wait();")
MUTATIONS = (
    Mutation("control", ATTENTION, "if (!is_whole) {", "if (is_whole == false) {"),
    Mutation(
        "without_the_barrier_behind_the_new_token",
        ATTENTION,
        "synchronize_cluster();  // the new token is in memory",
        "",
    ),
    Mutation("without_the_barrier_behind_the_list", ATTENTION, "__syncthreads();  // the list is whole", ""),
    Mutation("without_the_barrier_behind_a_split", ATTENTION, "__syncthreads();  // the warps' results are there", ""),
    Mutation(
        "without_the_barrier_before_the_next_split",
        ATTENTION,
        "__syncthreads();  // and merged: the next split may replace them",
        "",
    ),
    Mutation("without_the_wait_for_the_results", ATTENTION, "results.wait();", ""),
    Mutation("another_block_reads_the_new_token", ATTENTION, "cluster_rank() - appender) &", "cluster_rank()) &"),
    Mutation("another_block_reads_the_last_split", ATTENTION, ": plan.splits - 1;", ": 0;"),
    Mutation("another_block_reads_the_last_tile", ATTENTION, "% kAttentionWarps * blocks /", "% kAttentionWarps * 0 /"),
    Mutation("results_of_a_warp_are_not_expected", ATTENTION, "of_warps = kAttentionWarps *", "of_warps = 7 *"),
    Mutation("results_of_a_split_are_not_expected", ATTENTION, ": splits * group *", ": (splits - 1) * group *"),
    Mutation("two_tiles_are_read_early", TENSOR_CORE, "copy_async_wait<2>();", "copy_async_wait<3>();"),
    Mutation("without_the_wait_for_the_first_values", TENSOR_CORE, "copy_async_wait<1>();\n        rescale", "rescale"),
    Mutation("without_the_wait_for_the_last_values", TENSOR_CORE, "copy_async_wait<0>();", ""),
    Mutation(
        "the_tail_of_the_second_tile_counts", TENSOR_CORE, "leave_out(scores[1], firsts[1] + group_, rows.end);", ""
    ),
    Mutation("the_first_of_two_tiles_is_not_rescaled", TENSOR_CORE, "rescale_by(corrections[1]);", ""),
    Mutation(
        "maxima_of_two_tiles_are_of_a_lane", FRAGMENTS, "maxima[i / 2][i % 2], others[i]);", "others[i], others[i]);"
    ),
    Mutation("every_block_has_the_first_warps", ATTENTION, "is_whole ? turn * warps : 0", "0"),
    Mutation("a_block_has_too_few_warps", ATTENTION, "warp_index() < warps", "warp_index() < max(warps - 1, 1)"),
    Mutation("every_block_takes_the_first_split", ATTENTION, "is_whole ? 0 : turn; split", "0; split"),
    Mutation("splits_are_skipped", ATTENTION, "is_whole ? 1 : blocks;", "is_whole ? 1 : 2 * blocks;"),
    Mutation(
        "a_split_starts_at_the_first_token",
        ATTENTION,
        "share.tiles(warp, split * plan.tokens, end)",
        "share.tiles(warp, 0, end)",
    ),
    Mutation("a_split_ends_with_the_row", ATTENTION, "end = plan.end(split, row.count)", "end = row.count"),
    Mutation("results_stay_at_home", ATTENTION, "(to, outputs), 0)", "(to, outputs), cluster_rank())"),
    Mutation("parts_stay_at_home", ATTENTION, "(own_parts, 0)", "(own_parts, cluster_rank())"),
    Mutation("splits_stay_at_home", ATTENTION, "(split_outputs(splits), 0)", "(split_outputs(splits), cluster_rank())"),
    Mutation("totals_stay_at_home", ATTENTION, "(split_parts(splits), 0)", "(split_parts(splits), cluster_rank())"),
    Mutation("a_row_is_listed_that_has_no_list", ATTENTION, "head.list, !row.all, 0", "head.list, true, 0"),
    Mutation("a_list_is_not_read", ATTENTION, "head.list, !row.all, 0", "head.list, false, 0"),
    Mutation("one_split_is_merged_as_several", ATTENTION, "if (splits == 1) {", "if (splits == 0) {"),
    Mutation(
        "results_lie_over_the_keys",
        STEP,
        "layout.attention.results_end());",
        "0);",
    ),
    Mutation(
        "the_query_lies_over_the_ring",
        STEP,
        "of.layout.total > layout.attention.ring_end",
        "of.layout.total > 0",
    ),
    Mutation("a_head_keeps_the_query_of_the_first", STEP, "query[at] = value", "query[at % head_size] = value"),
    Mutation(
        "only_own_tokens_are_listed",
        STEP,
        "if (i < count) {\n                    list",
        "if (is_own && i < count) {\n                    list",
    ),
    Mutation(
        "tokens_of_a_page_are_listed_once", STEP, "first < count; first += kTogether", "first < 1; first += kTogether"
    ),
    Mutation(
        "the_last_told_token_is_lost",
        STEP,
        "i < min(count, first + kTogether)",
        "i < min(count - 1, first + kTogether)",
    ),
    Mutation(
        "every_block_tells_all_tokens", STEP, "is_told = is_own && selected != nullptr", "is_told = selected != nullptr"
    ),
    Mutation("last_tokens_are_not_listed", STEP, "i < limits.recent; i += kScoreThreads", "i < 0; i += kScoreThreads"),
    Mutation("last_tokens_are_not_told", STEP, "i < limits.recent; i += threads", "i < 0; i += threads"),
    Mutation("rows_that_take_no_part_are_left", STEP, "write_zeros<kScoreThreads>(output, outputs);", ""),
    Mutation(
        "the_first_kv_head_attends_for_all", STEP, "cache = number * append.capacity", "cache = 0 * append.capacity"
    ),
    Mutation(
        "statistics_are_skipped",
        SCORES,
        "first = (warp_index() >> shift) * kWarpSize",
        "first = warp_index() * kWarpSize",
    ),
    Mutation(
        "pages_of_eight_blocks", SCORES, "pages_of_block<Bound>(page + 1, blocks)", "pages_of_block<Bound>(page + 1, 8)"
    ),
    Mutation(
        "a_thread_ranks_once",
        SCORES,
        "first += kScoreThreads * kClusterPages",
        "first += 8 * kScoreThreads * kClusterPages",
    ),
)
MUTANTS = Mutants("src/cluster_step.cu", MUTATIONS, RARELY_INLINED, others=("src/hybrid_attention.cu",))


def check(library: KernelLibrary) -> None:
    """The bits of one launch after another: rows of one split and of several, in clusters of 8, 4 and 1 blocks, rows
    that read all their entries or take no part, last tokens."""
    library.set_schedule("shuffled", seed=3)
    sizes = {"heads": 8, "size": 40, "page": 3, "top_r": 19, "top_k": 20, "capacity": 401, "dtype": torch.float16}
    rows = step_case(lengths=(400, 299, -1, 13), token_budget=310, recent=7, seed=2, **sizes)
    for case in (pages_case(300, top_k=200, heads=2, page=6), pages_case(700, top_k=400, ties=True), rows):
        check_whole(library, case, 8)
    library.set_schedule("reverse")  # what the first block writes is there last
    check_whole(library, rows, 8)
    library.set_active_clusters(1)  # two KV heads have clusters of one block then
    check_whole(library, pages_case(1100, kv_heads=2, heads=2, top_k=900), 1)
    library.set_active_clusters(0)
    check_whole(library, heads_case(4, 300, top_k=150), 4)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_is_noticed(mutation: Mutation) -> None:
    MUTANTS.check_noticed(mutation, check)


def test_a_mutation_removes_every_barrier() -> None:
    text = (ROOT / "plugins_cuda" / ATTENTION).read_text()
    for barrier in BARRIERS:
        removed = sum(mutation.right.count(barrier) > mutation.wrong.count(barrier) for mutation in MUTATIONS)
        assert text.count(barrier) == removed, barrier
    assert not any(barrier in (ROOT / "plugins_cuda" / STEP).read_text() for barrier in BARRIERS)
