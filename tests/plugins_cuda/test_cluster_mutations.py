"""A barrier, a tie, a tail or a block's part that is wrong in a cluster that selects does not pass its tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.switches import CLUSTER_STEP
from tests.plugins_cuda.cases import step_case
from tests.plugins_cuda.checks import check_hybrid
from tests.plugins_cuda.mutants import RARELY_INLINED, Mutants, Mutation
from tests.plugins_cuda.test_rotated_attention import check_hybrid as check_rotated
from tests.plugins_cuda.test_rotated_attention import unrotated
from tests.plugins_cuda.test_score_and_select import WITH_CLUSTERS, check_same, pages_case

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STEP, SELECT = "kernels/score_and_select.cuh", "kernels/cluster_select.cuh"
STATISTICS, BOUNDS = "kernels/page_statistics.cuh", "kernels/staged_bounds.cuh"
SCORER = "kernels/page_scores_tensor_core.cuh"
APPENDS = "appends = cluster_rank() == appender"
ROTATED = "cluster_rank() == 0 ? append.rotated_of(head)"
BARRIER = "__syncthreads();"
BARRIERS = (BARRIER, "wait_for_cluster();", "announce_to_cluster();", "().wait();", "fence_inboxes();")


def without(name: str, file: str, what: str, context: str, instead: str = "") -> Mutation:
    """`context` occurs in `file` and has `what` once."""
    assert context.count(what) == 1
    return Mutation(f"without_{name}", file, context, context.replace(what, instead))


STORE = "store_token<false>(entry, append.keys.from(cache), append.values.from(cache), slot, size)"
MUTATIONS = (
    Mutation("control", STEP, "if (row.length > 0) {", "if (0 < row.length) {"),
    without("the_barrier_before_staging", STEP, BARRIER, f"{BARRIER}  // the channels"),
    without("the_barrier_behind_the_query", STEP, BARRIER, f"{BARRIER}  // the query is whole"),
    without("the_barrier_behind_the_scores", STEP, BARRIER, f"wait_for_cluster();\n        {BARRIER}"),
    without("the_wait_for_the_copies", STEP, "inboxes.bounds(part).wait();", "inboxes.bounds(part).wait();"),
    Mutation(
        "parts_of_the_bounds_are_scored_early", SCORER, "arrivals.wait_for(part++)", "arrivals.wait_for(0 * part++)"
    ),
    Mutation("a_row_is_of_the_part_before", STEP, "(row >= part_rows) +", "(row > part_rows) +"),
    Mutation("bounds_are_not_expected", STEP, ": rows * row_bytes);", ": rows * row_bytes - (rows > 0 ? 16 : 0));"),
    without("the_announcement", STEP, "announce_to_cluster();", "announce_to_cluster();"),
    without("the_wait_for_the_blocks", STEP, "wait_for_cluster();", "wait_for_cluster();"),
    without("the_wait_for_the_statistics", STEP, "inboxes.units().wait();", "inboxes.units().wait();"),
    without("the_wait_for_the_keys", STEP, "inboxes.keys().wait();", "inboxes.keys().wait();", BARRIER),
    without("the_fence_behind_the_inboxes", STEP, "fence_inboxes();", "fence_inboxes();"),
    Mutation(
        "statistics_of_a_unit_are_not_expected", STEP, "(group * units_of(pages) *", "((group * units_of(pages) - 1) *"
    ),
    Mutation("a_vector_of_keys_is_not_expected", STEP, "? vectors * static_cast", "? (vectors - 1) * static_cast"),
    Mutation(
        "statistics_of_the_last_head_are_not_sent",
        STEP,
        "if (from + i < query.group) {",
        "if (from + i + 1 < query.group) {",
    ),
    without("the_barrier_behind_the_histogram", SELECT, BARRIER, f"{BARRIER}\n        const FoundDigit found"),
    without("the_barrier_behind_the_totals", SELECT, BARRIER, f"= all;\n    {BARRIER}"),
    without("the_barrier_behind_the_digit", SELECT, BARRIER, f"{BARRIER}\n    return storage.found[0]"),
    Mutation("totals_of_the_first_warp_are_lost", SELECT, "(first < warp ? totals.x : 0)", "0"),
    Mutation("the_digit_is_the_last_that_suffices", SELECT, "before < quota && (quota", "(quota"),
    Mutation("keys_that_do_not_exist_count", SELECT, "if (exists && ((key", "if (((key"),
    Mutation("passes_share_a_histogram", SELECT, "part(pass * kWideBins, kWideBins)", "part(0 * pass, kWideBins)"),
    Mutation("one_histogram_is_not_cleared", SELECT, "i < kWideWords / 4 / kThreads", "i < kWideWords / 6 / kThreads"),
    Mutation("keys_for_the_first_blocks_alone", STEP, "rank = 0; rank < kClusterBlocks", "rank = 0; rank < 5"),
    Mutation(
        "keys_where_the_first_block_has_its_own",
        STEP,
        "vector = (task.start + first) / kClusterPages",
        "vector = first / kClusterPages",
    ),
    Mutation("the_last_page_has_no_key", STEP, "(row_keys(), last + 1)", "(row_keys(), last)"),
    Mutation(
        "a_thread_has_one_round",
        SELECT,
        "(count + kThreads - 1) / kThreads |",
        "(count + kThreads - 1) / (2 * kThreads) |",
    ),
    Mutation("a_thread_skips_keys", SELECT, "i < count; i += kInFlight", "i < count; i += 2 * kInFlight"),
    Mutation(
        "digits_of_other_prefixes_count",
        SELECT,
        "((key ^ prefix) & mask) == 0)",
        "(((key ^ prefix) & mask) == 0 || pass == 1))",
    ),
    Mutation("bins_of_a_group_are_turned_round", SELECT, "kGroupBins - 1 - place,", "place,"),
    Mutation("the_rest_of_a_group_is_not_counted", SELECT, "quota -= passed;", ""),
    Mutation("bins_are_compared_one_by_one", SELECT, "if (above < quota) {", "if (weights[i] < quota) {"),
    Mutation("the_group_weighs_as_its_first_bin", SELECT, "weight = weights[i + 1];", ""),
    Mutation(
        "every_block_names_all_pages",
        STEP,
        "is_own = page >= task.start && page < task.start + task.count",
        "is_own = true",
    ),
    Mutation(
        "a_block_names_too_few_pages", STEP, "page < task.start + task.count;", "page < task.start + task.count - 1;"
    ),
    Mutation(
        "the_last_units_are_lost",
        STEP,
        "(((pages + kWidth - 1) / kWidth + blocks - 1) >> log2_of_blocks(blocks))",
        "max((pages + kWidth - 1) / kWidth / blocks, 1)",
    ),
    Mutation("blocks_share_units", STEP, "kWidth = kVectorWidth<Bound>", "kWidth = kUnitPages", alone=True),
    Mutation(
        "fp8_is_stored_as_the_caches_type", STEP, "BoundTable<T>(table, kIsFp8<Bound>)", "BoundTable<T>(table, false)"
    ),
    Mutation("the_last_held_unit_is_lost", STATISTICS, "step < end) {", "step < end && i + 1 < kHeld) {"),
    Mutation("units_past_those_held_are_lost", STATISTICS, "sum += parts[i].sum * expf(parts[i].maximum - base);", ""),
    Mutation(
        "the_last_staged_row_is_lost", BOUNDS, "i < channels && row_bytes > 0", "i + 1 < channels && row_bytes > 0"
    ),
    Mutation("rows_begin_at_the_first_page", BOUNDS, "(row + static_cast<uint32_t>(start))", "row"),
    Mutation(
        "every_row_is_of_the_best_channel",
        BOUNDS,
        "static_cast<uint32_t>(chosen[i])",
        "static_cast<uint32_t>(chosen[0])",
    ),
    Mutation("the_changed_vector_is_copied_too", STEP, "(appends ? 1 : 0)", "0"),
    Mutation(
        "the_changed_vector_is_not_brought",
        STEP,
        "[at / kVectorWidth<Bound>] = is_upper ? maxima_",
        "[at / kVectorWidth<Bound>] = false ? maxima_",
    ),
    Mutation(
        "the_changed_page_is_staged_as_it_was", STEP, "staged.values[at] = from", "if (false) staged.values[at] = from"
    ),
    Mutation(
        "the_page_behind_is_changed", STEP, "by_page_size.quotient(row.length - 1)", "by_page_size.quotient(row.length)"
    ),
    Mutation("a_block_behind_appends", STEP, "lane > 0 && lane < blocks", "lane < blocks"),
    Mutation("zeros_are_left_out", BOUNDS, "end = to.rows * to.row", "end = channels * to.row"),
    Mutation("the_last_unit_is_not_in_the_softmax", STEP, "units_of(last + 1)", "units_of(last)"),
    Mutation(
        "statistics_for_the_first_block_alone", STEP, "row_units(), warp_index() & (blocks - 1)", "row_units(), 0"
    ),
    Mutation("statistics_where_the_first_block_has_its_own", STEP, "task.start / kUnitPages + unit]", "unit]"),
    Mutation(
        "the_last_page_is_full",
        STEP,
        "params.page_size, row.compared(params.limits), last + 1}",
        "params.page_size, row.length + params.page_size, last + 1}",
    ),
    Mutation(
        "tokens_of_the_first_block",
        STEP,
        "lists.write_page(page * params.page_size,",
        "lists.write_page((page - task.start) * params.page_size,",
    ),
    Mutation("every_block_appends", STEP, APPENDS, "appends = true"),
    Mutation("the_first_block_appends", STEP, APPENDS, "appends = cluster_rank() == 0"),
    Mutation("bounds_are_raised_by_another_key", STEP, f"key = {STORE};", f"key = 0.0f * {STORE};"),
    Mutation("bounds_of_rows_read_whole_are_not_raised", STEP, "changed.raise(key);", ""),
    Mutation(
        "only_the_first_block_fills_the_list",
        STEP,
        "const int thread = cluster_rank() * kScoreThreads + static_cast",
        "const int thread = static_cast",
    ),
    Mutation(
        "last_tokens_are_beyond_the_quota",
        STEP,
        "(row_keys(), last + 1), row.best(params.limits)",
        "(row_keys(), last + 1), row.count",
    ),
    Mutation(
        "last_tokens_are_not_written",
        STEP,
        "lists.write_recent(row, params",
        "if (false) lists.write_recent(row, params",
    ),
    Mutation("arrivals_are_left", STEP, "append.arrivals[head] = 0;", ""),
    Mutation("every_block_writes_the_rotated_query", STEP, f"{ROTATED} : nullptr", "append.rotated_of(head)"),
    Mutation("no_block_writes_the_rotated_query", STEP, f"{ROTATED} : nullptr", "nullptr"),
)
MUTANTS = Mutants("src/hybrid_attention.cu", MUTATIONS, RARELY_INLINED)


def check(library: KernelLibrary) -> None:
    """The reference's choices, and the bits of one launch after another: ties within blocks and between them, rows with
    fewer units than blocks, blocks of which several warps have pages, partial pages, rows that select nothing."""
    sizes = ((9, 3, False, 1), (300, 40, True, 9), (521, 100, False, 4), (2100, 700, True, 4))
    cases = [pages_case(pages, top_k=top_k, ties=ties, seed=pages, heads=heads) for pages, top_k, ties, heads in sizes]
    cases += [pages_case(pages, top_k=pages // 3, seed=pages, heads=heads, fp8=True, ties=heads == 4)
              for pages, heads in ((40, 4), (137, 9), (300, 4), (1200, 5))]  # fmt: skip
    alike = pages_case(400, top_k=333, page=2, capacity=801)
    alike.query.zero_()
    last = step_case(lengths=(400,), heads=8, page=16, top_r=19, top_k=70, capacity=401, dtype=torch.bfloat16)
    last.k_new.copy_(2 * last.query[:, ::4])  # one head looks at the last page, where this is the only token
    lengths = (400, 13, 2, -1, 384)
    rows = [step_case(lengths=lengths, heads=8, size=40, page=3, top_r=19, top_k=10, token_budget=5, ties=ties,
                      capacity=401, dtype=torch.float16, seed=4) for ties in (False, True)]  # fmt: skip
    recent = step_case(lengths=(400, 100), heads=8, page=3, top_r=19, top_k=40, recent=7, capacity=401, seed=5,
                       dtype=torch.bfloat16)  # fmt: skip
    far = pages_case(1000, top_k=100, heads=4)
    far.k_new.copy_(2 * far.query[:, ::4])  # one head looks at the last unit, of the fourth warp's part
    beyond = pages_case(1000, top_k=100, heads=9)
    beyond.k_new.copy_(2 * beyond.query[:, ::9])  # the same, where a lane has more units than it holds
    channels = step_case(lengths=(400,), heads=4, kv_heads=1, size=128, page=2, top_r=90, top_k=30, capacity=401,
                         dtype=torch.bfloat16, seed=7)  # more than a block's warps stage at a time  # fmt: skip
    cases += [
        recent,
        alike,
        last,
        far,
        beyond,
        channels,
        *rows,
    ]  # those of many rows take longest: most mistakes are noticed before
    library.set_device(WITH_CLUSTERS)
    with CLUSTER_STEP.off(library):
        library.set_schedule("reverse")  # what the first block writes is there last
        check_hybrid(library, last)
        library.set_schedule("shuffled", seed=8)
        for case in cases:
            check_hybrid(library, case)
        check_rotated(library, unrotated(rows[0]))
    for case in cases:
        check_same(library, case)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_is_noticed(mutation: Mutation) -> None:
    MUTANTS.check_noticed(mutation, check)


def test_a_mutation_removes_every_barrier() -> None:
    """Every barrier of the two headers is removed by one of the mutations."""
    for file in (STEP, SELECT):
        text = (ROOT / "plugins_cuda" / file).read_text()
        for barrier in BARRIERS:
            removed = sum(
                mutation.right.count(barrier) > mutation.wrong.count(barrier)
                for mutation in MUTATIONS
                if mutation.file == file
            )
            assert text.count(barrier) == removed, f"{file}: {barrier}"
