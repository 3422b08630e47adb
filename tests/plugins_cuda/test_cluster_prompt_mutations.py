"""A barrier, a digit, a tie or a block's part that is wrong in a cluster that selects from a prompt is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.mutants import RARELY_INLINED, Mutants, Mutation
from tests.plugins_cuda.test_cluster_select_prompt import cases, check_selected

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "kernels/cluster_select_prompt.cuh"
BARRIERS = ("__syncthreads();", "announce_to_cluster();", "wait_for_cluster();", ").wait();", "fence_inboxes();")
OWN_RANK = "; ++rank) {\n            "
MUTATIONS = (
    Mutation("control", PROMPT, "if (of.chosen > 0) {", "if (0 < of.chosen) {"),
    Mutation("without_the_announcement", PROMPT, "announce_to_cluster();", ""),
    Mutation("without_the_wait_for_the_blocks", PROMPT, "wait_for_cluster();", ""),
    Mutation("without_the_barrier_behind_the_clearing", PROMPT, "__syncthreads();\n            selection", "selection"),
    Mutation("without_the_barrier_behind_the_counts", PROMPT, "__syncthreads();\n            send", "send"),
    Mutation("without_the_wait_for_the_counts", PROMPT, "inbox(pass).wait();", ""),
    Mutation("without_the_fence_behind_the_inboxes", PROMPT, "fence_inboxes();", ""),
    Mutation(
        "passes_share_an_inbox", PROMPT, "{counters.part(number, 1)}", "{counters.part(number == 1 ? 0 : number, 1)}"
    ),
    Mutation(
        "counts_of_one_block_are_not_expected",
        PROMPT,
        "expect(pass, Exchange::kVectors *",
        "expect(pass, (Exchange::kVectors - kRadixBins) *",
    ),
    Mutation(
        "shares_of_one_block_are_not_expected",
        PROMPT,
        "expect(kWidePasses, kClusterBlocks *",
        "expect(kWidePasses, (kClusterBlocks - 1) *",
    ),
    Mutation(
        "without_the_barrier_behind_the_sums",
        PROMPT,
        "__syncthreads();\n            const auto group",
        "const auto group",
    ),
    Mutation("without_the_wait_for_the_shares", PROMPT, "inbox(kWidePasses).wait();", ""),
    Mutation("passes_share_a_buffer", PROMPT, "pass % 2 * Exchange::kVectors", "0 * pass * Exchange::kVectors"),
    Mutation("counts_are_not_cleared", PROMPT, "clear_group(group);\n        const uint4 words", "const uint4 words"),
    Mutation("half_of_the_bins_are_cleared", PROMPT, "group < kRadixBins) {", "group < kRadixBins / 2) {"),
    Mutation(
        "counts_for_the_first_blocks_alone",
        PROMPT,
        f"kClusterBlocks{OWN_RANK}inbox(pass).outgoing",
        f"5{OWN_RANK}inbox(pass).outgoing",
    ),
    Mutation(
        "counts_where_the_first_block_has_its_own",
        PROMPT,
        "[cluster_rank() * kRadixBins + group] = words",
        "[group] = words",
    ),
    Mutation("bins_of_a_word_are_swapped", PROMPT, "lower.x | lower.y << 16", "lower.y | lower.x << 16"),
    Mutation(
        "upper_halves_are_not_added", PROMPT, "sum += (halves & 0xffffu) + (halves >> 16)", "sum += halves & 0xffffu"
    ),
    Mutation("a_word_is_not_added", PROMPT, "words.x + words.y + words.z + words.w", "words.x + words.y + words.z"),
    Mutation(
        "the_last_blocks_are_not_added", PROMPT, f"kClusterBlocks{OWN_RANK}const uint4", f"4{OWN_RANK}const uint4"
    ),
    Mutation("groups_ascend", PROMPT, "group_sums[kRadixBins - 1 - group]", "group_sums[group]"),
    Mutation("bins_of_one_block", PROMPT, "step = kWords; step < kWarpSize", "step = kWarpSize; step < kWarpSize"),
    Mutation("words_above_are_lost", PROMPT, "(word < 2 ? others : 0)", "0"),
    Mutation("the_neighbour_above_is_lost", PROMPT, "(word % 2 == 0 ? neighbour : 0)", "0"),
    Mutation("the_neighbour_below_counts", PROMPT, "word % 2 == 0 ? neighbour", "word % 2 == 1 ? neighbour"),
    Mutation("the_lower_bin_is_always_taken", PROMPT, "in_upper = quota <= above + upper", "in_upper = false"),
    Mutation("the_rest_is_that_of_the_word", PROMPT, "in_upper ? above : above + upper", "above"),
    Mutation("passes_end_too_soon", PROMPT, "if (weight <= quota) break;", "if (weight <= quota + 20) break;"),
    Mutation("digits_of_other_prefixes_count", PROMPT, "& mask) == 0) {", "& mask) == 0 || pass == 1) {"),
    Mutation("the_last_key_is_lost", PROMPT, "min(each, count - own.first)", "min(each, count - own.first - 1)"),
    Mutation("keys_of_the_window_take_part", PROMPT, "(row, of.votes)", "(row, of.n)"),
    Mutation("too_few_keys_of_a_thread", PROMPT, "(count + kOthers - 1) / kOthers", "count / kOthers"),
    Mutation(
        "every_block_has_the_first_keys",
        PROMPT,
        "own.first = (cluster_rank() * kThreads +",
        "own.first = (0 * kThreads +",
    ),
    Mutation("keys_that_a_thread_lacks_are_selected", PROMPT, "equal &= keys.own;", ""),
    Mutation("keys_behind_the_row_take_part", PROMPT, "j + 1 < left ? four.y : 0", "four.y"),
    Mutation("larger_ones_are_not_counted", PROMPT, "before.larger", "0"),
    Mutation(
        "warps_of_one_block_are_counted",
        PROMPT,
        "number = cluster_rank() * kWarps + warp_index()",
        "number = warp_index()",
    ),
    Mutation("the_own_warp_is_counted", PROMPT, "if (first + lane < number) {", "if (first + lane <= number) {"),
    Mutation("the_first_warps_are_counted", PROMPT, "first < kClusterBlocks * kWarps", "first < kWarps"),
    Mutation("shares_for_the_first_block_alone", PROMPT, "outgoing(shares(), lane)", "outgoing(shares(), 0)"),
    Mutation("ties_of_all_blocks", PROMPT, "ties = threshold.ties - before.equal", "ties = threshold.ties"),
    Mutation(
        "the_first_ties_are_lost",
        PROMPT,
        "equal & ~(0x80000000u >> __clz(static_cast<int32_t>(equal)))",
        "equal & (equal - 1)",
    ),
    Mutation(
        "every_block_writes_the_rest",
        PROMPT,
        "thread = cluster_rank() * kThreads + static_cast",
        "thread = static_cast",
    ),
    Mutation(
        "the_last_slots_are_left",
        PROMPT,
        "thread, kClusterBlocks * kThreads)",
        "thread, 2 * kClusterBlocks * kThreads)",
    ),
    Mutation(
        "no_length_is_written", PROMPT, "if (blockIdx.y == 0 && thread == 0) {", "if (blockIdx.y == 1 && thread == 0) {"
    ),
)
MUTANTS = Mutants("src/compact.cu", MUTATIONS, RARELY_INLINED)


def check(library: KernelLibrary) -> None:
    """Any block goes first; among equal keys also the last one."""
    *others, ties = cases()
    for case in others:
        check_selected(library, case, ("shuffled",))
    check_selected(library, ties, ("reverse", "shuffled"))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_is_noticed(mutation: Mutation) -> None:
    MUTANTS.check_noticed(mutation, check)


def test_a_mutation_removes_every_barrier() -> None:
    text = (ROOT / "plugins_cuda" / PROMPT).read_text()
    for barrier in BARRIERS:
        removed = sum(mutation.right.count(barrier) > mutation.wrong.count(barrier) for mutation in MUTATIONS)
        assert text.count(barrier) == removed, barrier
