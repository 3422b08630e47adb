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
SCORES, BOUNDS = "kernels/score_and_select.cuh", "kernels/staged_bounds.cuh"
BARRIERS = ("__syncthreads();", "synchronize_cluster();")
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
    Mutation(
        "without_the_barrier_behind_the_results",
        ATTENTION,
        "synchronize_cluster();\n        if (cluster_rank() == 0)",
        "__syncthreads();\n        if (cluster_rank() == 0)",
    ),
    Mutation("every_block_has_the_first_warps", ATTENTION, "is_whole ? cluster_rank() * warps : 0", "0"),
    Mutation("a_block_has_too_few_warps", ATTENTION, "warp_index() < warps", "warp_index() < max(warps - 1, 1)"),
    Mutation("every_block_takes_the_first_split", ATTENTION, "is_whole ? 0 : cluster_rank(); split", "0; split"),
    Mutation("splits_are_skipped", ATTENTION, "is_whole ? 1 : blocks;", "is_whole ? 1 : 2 * blocks;"),
    Mutation(
        "a_split_starts_at_the_first_token",
        ATTENTION,
        "share.tiles(warp, split * plan.tokens, end)",
        "share.tiles(warp, 0, end)",
    ),
    Mutation("a_split_ends_with_the_row", ATTENTION, "end = plan.end(split, row.count)", "end = row.count"),
    Mutation(
        "results_stay_at_home", ATTENTION, "to_block = is_whole ? 0 : cluster_rank()", "to_block = cluster_rank()"
    ),
    Mutation("parts_stay_at_home", ATTENTION, "kWarpHeads).of_block(to_block)", "kWarpHeads)"),
    Mutation("splits_stay_at_home", ATTENTION, "split_outputs(splits).of_block(0)", "split_outputs(splits)"),
    Mutation("totals_stay_at_home", ATTENTION, "split_parts(splits).of_block(0)", "split_parts(splits)"),
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
        "layout.selection.total > layout.attention.ring_end",
        "layout.selection.total > 0",
    ),
    Mutation("a_head_keeps_the_query_of_the_first", STEP, "query[head * of.head_size + d] = ", "query[d] = "),
    Mutation(
        "only_own_tokens_are_listed",
        STEP,
        "list[slot + i] = token + i;\n            if (is_told)",
        "if (is_own) list[slot + i] = token + i;\n            if (is_told)",
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
    Mutation("zeros_in_the_next_row", BOUNDS, "place < to.row", "true"),
)
MUTANTS = Mutants("src/cluster_step.cu", MUTATIONS, RARELY_INLINED, others=("src/hybrid_attention.cu",))


def check(library: KernelLibrary) -> None:
    """The bits of one launch after another: rows of one split and of several, in clusters of 8, 4 and 1 blocks, rows
    that read all their entries or take no part, last tokens."""
    library.set_schedule("shuffled", seed=3)
    sizes = {"heads": 8, "size": 40, "page": 3, "top_r": 19, "top_k": 20, "capacity": 401, "dtype": torch.float16}
    rows = step_case(lengths=(400, 299, -1, 13), token_budget=310, recent=7, seed=2, **sizes)
    for case in (pages_case(300, top_k=200, heads=2), pages_case(700, top_k=400, ties=True), rows):
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
