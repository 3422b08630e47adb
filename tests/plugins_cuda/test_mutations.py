"""Mistakes in the kernels of the observation scores and of attention are noticed, whichever barrier, rule or tail they
break. (Selection and gathering: test_compact_mutations.py and test_hybrid_mutations.py.)

Kernels run under the race detector, so that a missing barrier shows even where every schedule gives the same result.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from kvc_trt.kernels.library import SCHEDULES, KernelLibrary
from tests.plugins_cuda import test_observation_scores as observation
from tests.plugins_cuda.cases import step_case
from tests.plugins_cuda.checks import check_dense, check_hybrid
from tests.plugins_cuda.mutants import Check, Mutants, Mutation
from tests.plugins_cuda.test_rotated_attention import check_dense as check_rotated
from tests.plugins_cuda.test_rotated_attention import unrotated

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FLOAT, HALF = torch.float32, torch.bfloat16
BARRIER, WARP_BARRIER, WAIT = "__syncthreads();\n", "__syncwarp();\n", "copy_async_wait<0>();\n"


def without(what: str, file: str, *, before: str = "", after: str = "") -> Mutation:
    """`what` removed between two pieces of text, which tell it from others of the file."""
    name = f"{file.split('.')[0]} without {what.strip()[:-3]} {'before' if before else 'after'} {before or after}"
    return Mutation(re.sub(r"\W+", "_", name)[:80], f"kernels/{file}", f"{after}{what}{before}", f"{after}{before}")


def wrong(name: str, file: str, right: str, instead: str) -> Mutation:
    return Mutation(name, f"kernels/{file}", right, instead)


# ---- Checks that a library must pass


def in_every_schedule(check: Check, library: KernelLibrary) -> None:
    for order in SCHEDULES:
        library.set_schedule(order, seed=8)
        check(library)


def votes(library: KernelLibrary) -> None:
    """Several chunks, one of them partial; a row that is not scored; a tile of query rows, two, and more than fit."""
    for dtype, window in ((FLOAT, 9), (HALF, 8)):
        q_window, k = observation.inputs([531, 16, 30], size=16, window=window, kv_heads=1, dtype=dtype)
        observation.check(library, q_window, k, [531, 16, 30], 16)
    q_window, k = observation.inputs([26], size=256, window=12, group=5, kv_heads=1)
    observation.check(library, q_window, k, [26], 16)


def attention(library: KernelLibrary) -> None:
    """One split, of two tiles a warp too, and several; a partial tile; more heads than a warp takes; rings of two tiles
    and of one (heads of more than 128); inactive and full rows in the same batch."""
    for dtype, group, size in ((FLOAT, 3, 80), (HALF, 3, 80), (HALF, 9, 80), (HALF, 2, 136)):
        lengths = [301, 20, 250, -1, 0, 310]
        case = step_case(lengths=lengths, capacity=310, heads=group, kv_heads=1, size=size, dtype=dtype)
        check_dense(library, case)
        case.query[..., 3] = 1.0  # whole tiles of scores -inf, before finite ones
        case.k_cache[0, :, :150, 3] = -math.inf
        check_dense(library, case)


def several_splits(library: KernelLibrary) -> None:
    """Rows of four splits and of three, by the two blocks that a sparse row's splits need."""
    case = step_case(lengths=[500, 290], capacity=501, heads=3, kv_heads=1, size=48, top_k=257, token_budget=501)
    check_hybrid(library, case)


def lists(library: KernelLibrary) -> None:
    """Sparse rows of one split and of several, and one whose splits are longer than the part of a list in a block."""
    rows = {"kv_heads": 1, "token_budget": 0, "dtype": HALF}
    for top_k in (100, 300):
        check_hybrid(library, step_case(lengths=[340, 310], heads=2, top_k=top_k, **rows))
    check_hybrid(library, step_case(lengths=[16400], heads=1, size=16, page=64, top_k=16385, **rows))


def rotation(library: KernelLibrary) -> None:
    """A group of more heads than are read at a time."""
    for dtype in (FLOAT, HALF):
        case = step_case(lengths=[40, 9], capacity=41, heads=6, kv_heads=1, size=24, dtype=dtype)
        check_rotated(library, unrotated(case))


SOURCES: dict[Check, str] = {
    votes: "src/compact.cu",
    attention: "src/dense_attention.cu",
    rotation: "src/dense_attention.cu",
    several_splits: "src/hybrid_attention.cu",
    lists: "src/hybrid_attention.cu",
}

# ---- The mistakes

ROW, STATISTICS, VOTES = "observation_row.cuh", "observation_statistics.cuh", "observation_votes.cuh"
TILES, MERGE, TILE = "observation_tiles.cuh", "attention_merge.cuh", "attention_tile.cuh"
TOKEN = "new_token.cuh"
TENSOR_CORE, FMA, SPARSE = "attention_tensor_core.cuh", "attention_fma.cuh", "sparse_attention.cuh"
FRAGMENTS = "attention_fragments.cuh"
OLDEST = ("copy_async_wait<1>();", "copy_async_wait<3>();")
CALLS = ("__syncthreads();", "__syncwarp();", "copy_async_wait<0>();", *OLDEST, "__threadfence();")

KEYS_ARE_REPLACED_EARLY = (
    "wait_for_oldest();\n            multiply_keys(stage, scores);",
    "wait_for_oldest();\n            copy_keys(rows, first + ahead, stage);\n            multiply_keys(stage, scores);",
)

MUTATIONS: dict[Check, tuple[Mutation, ...]] = {
    votes: (
        wrong("control_votes", ROW, "n > budget ? n : 0", "budget < n ? n : 0"),
        without(BARRIER, STATISTICS, before="        for (int64_t key = chunk.first"),
        without(BARRIER, STATISTICS, before="        store_partials<T"),
        without(BARRIER, STATISTICS, after="first_row);\n        "),
        without(WARP_BARRIER, STATISTICS, before="}"),
        without("__syncwarp();", STATISTICS, before="  // the shuffles of add_tile"),
        without(BARRIER, VOTES, before="        for (int64_t key = chunk.first"),
        without(BARRIER, VOTES, after="first_row == 0);\n        }\n        "),
        without(WARP_BARRIER, TILES, before="#pragma unroll"),
        without(WARP_BARRIER, TILES, after=f"{WAIT}        "),
        without(WAIT, TILES, before="        __syncwarp"),
        without("copy_async_commit();\n", TILES, before=f"        {WAIT}"),
        wrong("a_row_of_the_budget_is_scored", ROW, "n > budget", "n >= budget"),
        wrong("nothing_seen_is_nan", ROW, "maximum == -INFINITY ? 0.0f : maximum", "maximum"),
        wrong("window_sees_one_more", STATISTICS, "key >= hidden", "key > hidden"),
        wrong("window_sees_one_less", STATISTICS, "n - params.window + 1;", "n - params.window;"),
        wrong("last_warp_is_lost", STATISTICS, "warp < Tile::kWarps; ++warp", "warp < Tile::kWarps - 1; ++warp"),
        wrong("last_chunk_is_lost", STATISTICS, "chunk * kChunkKeys < n", "(chunk + 1) * kChunkKeys < n"),
        wrong("copies_of_the_last_row_count", VOTES, "first_row + row < chunk.rows", "true"),
        wrong("earlier_rows_are_forgotten", VOTES, "is_first ? 0.0f : output[key]", "0.0f"),
        wrong("the_window_is_voted_on", VOTES, "key < end)", "key <= end)"),
    ),
    attention: (
        wrong("control_attention", MERGE, "first < splits; first +=", "splits > first; first +="),
        without(BARRIER, SPARSE, before="    const int group = task.group"),
        without(BARRIER, MERGE, before="    if (threadIdx.x == 0)"),
        without(BARRIER, MERGE, before="    return buffers.is_last"),
        without(BARRIER, MERGE, before="    for (int item = "),
        without("__threadfence();\n", MERGE, before="        buffers.is_last"),
        wrong("nobody_is_last", MERGE, "== splits - 1;", "== splits;"),
        wrong("first_maximum_is_nan", TILE, "maximum == -INFINITY ? 0.0f : maximum", "maximum"),
        wrong("reads_past_the_end", TILE, "token < end ? token : end - 1", "token"),
        without("copy_async_wait<1>();\n", TENSOR_CORE, before="        } else"),
        without("copy_async_wait<3>();\n", TENSOR_CORE, after="} else {\n            "),
        without("__syncwarp();", TENSOR_CORE, before="  // the other lanes have read"),
        wrong("a_ring_of_one_is_read_early", TENSOR_CORE, "wait<1>();\n        } else", "wait<2>();\n        } else"),
        wrong("a_ring_of_two_is_read_early", TENSOR_CORE, "wait<3>", "wait<4>"),
        wrong("keys_are_replaced_early", TENSOR_CORE, *KEYS_ARE_REPLACED_EARLY),
        wrong("tail_of_a_tile_counts", FRAGMENTS, "token + 8 < end ?", "token + 7 < end ?"),
        wrong("weights_change_places", FRAGMENTS, "group % 2 == 0 ? kLower", "group % 2 != 0 ? kLower"),
        wrong("tail_of_a_batch_counts", FMA, "tokens[j] < rows.end ?", "tokens[j] <= rows.end ?"),
        wrong("a_full_row_takes_part", "attended_row.cuh", "cache_length < capacity", "cache_length <= capacity"),
        wrong("split_ends_late", SPARSE, "count - split * tokens < tokens ?", "false ?"),
    ),
    rotation: (
        wrong("control_rotation", TOKEN, "first < group; first +=", "group > first; first +="),
        wrong("later_heads_are_not_rotated", TOKEN, "first < group; first +=", "first < 1; first +="),
        wrong("each_head_is_rotated_as_the_first", TOKEN, "rotated(read[i])", "rotated(read[0])"),
    ),
    several_splits: (
        wrong("control_several_splits", SPARSE, "task[0].split < task[0].splits", "task[0].splits > task[0].split"),
        without(BARRIER, SPARSE, before="    }\n}"),
        wrong("a_block_stops_after_one_split", SPARSE, "].split += static_cast<int>(gridDim.z)", "].split = 64"),
        wrong("a_block_takes_splits_of_others", SPARSE, "split += static_cast<int>(gridDim.z)", "split += 1"),
        wrong("results_go_to_the_first_split", SPARSE, "int64_t{task.split} * group", "int64_t{blockIdx.z} * group"),
    ),
    lists: (
        wrong("control_lists", SPARSE, "if (next == task.end())", "if (task.end() == next)"),
        without("copy_async_wait<0>();\n", SPARSE, before="    __syncthreads();\n\n"),
        without(BARRIER, SPARSE, before="\n    if (row.count == 0"),
        without("__syncthreads();", SPARSE, before="  // the other warps have read"),
        without("copy_async_wait<0>();\n", SPARSE, after="task.end(), list);\n        "),
        without(BARRIER, SPARSE, after="task.first = next;\n        }\n        "),
        wrong("every_list_starts_with_the_row", TILE, "list[inside - first]", "list[inside]"),
        wrong("later_parts_have_the_first_list", SPARSE, "task.kv, next, task.end()", "task.kv, 0, task.end()"),
    ),
}  # fmt: skip
MUTANTS = {
    source: Mutants(source, [one for check, ones in MUTATIONS.items() if SOURCES[check] == source for one in ones])
    for source in SOURCES.values()
}
PAIRS = [(check, mutation) for check, mutations in MUTATIONS.items() for mutation in mutations]


@pytest.mark.parametrize(("check", "mutation"), PAIRS, ids=[mutation.name for _, mutation in PAIRS])
def test_a_mistake_is_noticed(check: Check, mutation: Mutation) -> None:
    MUTANTS[SOURCES[check]].check_noticed(mutation, partial(in_every_schedule, check))


def test_every_barrier_is_tried() -> None:
    """Every barrier, wait and fence of these headers is removed by one of the mutations, but those listed here."""
    # The reader's fence: the emulation knows no stale cache line. Two tiles at once: test_cluster_step_mutations.py.
    harmless = {MERGE: 1, TENSOR_CORE: 2}
    for file in (STATISTICS, VOTES, TILES, MERGE, TENSOR_CORE, SPARSE):
        text = (ROOT / "plugins_cuda/kernels" / file).read_text()
        there = sum(text.count(call) for call in CALLS)
        removed = sum("without" in mutation.name and "commit" not in mutation.name
                      for _, mutation in PAIRS if mutation.file == f"kernels/{file}")  # fmt: skip
        assert there == removed + harmless.get(file, 0), f"{file} has {there}, {removed} are removed"
