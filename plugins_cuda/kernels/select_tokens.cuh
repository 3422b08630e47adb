// Chooses the tokens that a decode step reads: the best pages by their share of attention, cut to top_k tokens.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3, step 8 of hybrid attention: top_k tokens by (f descending, x
// ascending), f[x] being their share of attention (page_shares.cuh). Tokens of a page have one share, so pages are
// selected by weight (radix_select.cuh) and the last one gives its lowest tokens. The last `recent` tokens of a row are
// taken first and are not compared: they weigh nothing in their pages (docs/decisions/0052-last-tokens.md).
//
//   in   scores fp32 [B,G,H/G,8U] of page_scores.cuh and the statistics of their units [B,G,H/G,U]
//   out  indices int32 [B,G,index_stride]: the top_k slots of a row that does not read all its entries, ascending;
//        selected int32 [B,G,selected_width], or null: the same for the caller, 0..m-1 for other rows, -1 past the end
//
// One block per (row, KV head), grid (G, B): a softmax and a selection over 500 to 4300 pages is latency, not work. The
// softmax comes from statistics of units of pages (page_statistics.cuh), so scores are read once, several neighbouring
// pages by a thread. Keys stay in its registers while each thread has at most 8 pages, then in shared memory up to
// KeysInShared::kMostPages, then in the workspace.
//
// A score of NaN or +inf makes the head's share NaN everywhere, hence f of every page: all rank equally low, and the
// lowest slots are read. So do scores that are all -inf.
//
// Bytes per KV head: 4 g P read, 4 top_k written, twice with `selected`. Exponentials: g P.
//
// Determinism: a row's pages and their statistics depend on the row alone; pages past its end take no part, so neither
// the capacity nor the batch changes a bit. Equal scores give equal keys.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/attended_row.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/emit_selected.cuh"
#include "kernels/numeric.cuh"
#include "kernels/page_shares.cuh"
#include "kernels/page_statistics.cuh"
#include "kernels/platform.cuh"
#include "kernels/radix_select.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"
#include "kvc/limits.h"

namespace kvc {

constexpr int kTokenThreads = 512;
constexpr int kTokenWarps = kTokenThreads / kWarpSize;
constexpr int kTokenBlocks = 2;  // per multiprocessor, at least: 64 registers
constexpr int kTokenCopies = 8;  // histograms of the radix selection, see there
static_assert(kTokenWarps >= KVC_LARGEST_GROUP, "every head has a warp");

struct SelectTokensParams {
    const float* scores;           // [B,G,H/G,8U]
    const ScoreStatistics* units;  // [B,G,H/G,U] of the scores
    const int64_t* cache_lengths;  // [B]: entries before the append
    uint32_t* keys;                // [B,G,P]; used by KeysInWorkspace
    int32_t* indices;              // [B,G,index_stride]
    int32_t* selected;             // [B,G,selected_width] or null
    AttentionLimits limits;
    int64_t index_stride;
    int64_t selected_width;
    int32_t group;      // H/G
    int32_t page_size;  // p
    int32_t pages;      // P
};

// The destination of the chosen tokens.
struct TokenLists {
    int32_t* indices;
    int32_t* selected;  // or null

    __device__ __forceinline__ void write(int32_t token, int32_t slot) const {
        indices[slot] = token;
        if (selected != nullptr) {
            selected[slot] = token;
        }
    }

    // Writes the last tokens of a row that does not read all, behind the best ones of those before them; by `threads`
    // threads, this one being number `thread`.
    __device__ __forceinline__ void write_recent(const AttendedRow& row, const AttentionLimits& limits, int32_t thread,
                                                 int32_t threads) const {
#pragma unroll 1
        for (int32_t i = thread; i < limits.recent; i += threads) {
            write(row.compared(limits) + i, row.best(limits) + i);
        }
    }
};

// The place of a block's page keys between the passes of the selection.
template <int kPagesPerThread>
struct KeysInRegisters {
    static constexpr int kPages = kPagesPerThread;
    static constexpr int32_t kMostPages = kTokenThreads * kPages;
};
struct KeysInShared {
    static constexpr int32_t kMostPages = 16 * 1024;  // 64 KiB
};
struct KeysInWorkspace {};

// Shared memory of the selection.
struct SelectionStorage {
    SharedSpan<HeadSoftmax> heads;
    SharedSpan<uint32_t> histogram;
    SharedSpan<uint32_t> sums;
    SharedSpan<int32_t> shares;
};

// Fills storage.heads and clears the histogram, followed by a barrier.
__device__ __forceinline__ void find_softmax(const ScoredPages& pages, const SelectionStorage& storage) {
    clear_histogram<kTokenThreads, kTokenCopies>(storage.histogram);
    constexpr int kHeldUnits = 4;
    head_softmax<kTokenThreads, kHeldUnits>(pages.units, pages.row_units, units_of(pages.count), pages.group,
                                            storage.heads);
}

// Writes the best `quota` tokens by the pages' keys.
template <class Keys>
__device__ __forceinline__ void write_best(const ScoredPages& pages, int32_t quota, const Keys& keys,
                                           const SelectionStorage& storage, const TokenLists& lists) {
    const auto weight_at = [&](int32_t page) { return pages.weight(page); };
    const auto emit = [&](int32_t page, int32_t slot, int32_t count) {
#pragma unroll 1
        for (int32_t i = 0; i < count; ++i) {
            lists.write(page * pages.page_size + i, slot + i);
        }
    };
    const Threshold threshold = find_threshold<kTokenThreads, kTokenCopies>(keys, quota, pages.page_size, weight_at,
                                                                            storage.histogram, storage.sums);
    emit_ascending<kTokenThreads>(keys, threshold, weight_at, storage.shares, emit);
}

// Keys in registers. Scores are read before the softmax is known, so that both are under way together.
template <int kPages>
__device__ __forceinline__ void select_in_registers(const ScoredPages& pages, int32_t quota,
                                                    const SelectionStorage& storage, const TokenLists& lists) {
    RegisterKeys<kPages> keys{};
    keys.first = static_cast<int32_t>(threadIdx.x) * kPages;
    keys.count = pages.count - keys.first;
    ScoreTile<kPages> scores;
    scores.read(pages, keys.first, 0);
    find_softmax(pages, storage);
    if (keys.count > 0) {
        rank_pages(pages, storage.heads, keys.first, scores, keys.keys);
    }
    write_best(pages, quota, keys, storage, lists);
}

// `keys` is indexed by page.
template <class Keys>
__device__ __forceinline__ void select_in_memory(const ScoredPages& pages, int32_t quota, Keys keys,
                                                 const SelectionStorage& storage, const TokenLists& lists) {
    constexpr int kPages = kVectorWidth<float>;
    find_softmax(pages, storage);
#pragma unroll 1
    for (int32_t first = static_cast<int32_t>(threadIdx.x) * kPages; first < pages.count;
         first += kTokenThreads * kPages) {
        ScoreTile<kPages> scores;
        uint32_t ranked[kPages];
        scores.read(pages, first, 0);
        rank_pages(pages, storage.heads, first, scores, ranked);
#pragma unroll
        for (int j = 0; j < kPages; ++j) {
            if (first + j < pages.count) {
                keys[first + j] = ranked[j];
            }
        }
    }
    __syncthreads();
    const auto key_at = [&](int32_t page) { return keys[page]; };
    write_best(pages, quota, memory_keys<kTokenThreads>(pages.count, key_at), storage, lists);
}

// Writes 0..count-1 and then -1, from slot `first` on; by `threads` threads, this one being number `thread`.
__device__ __forceinline__ void fill_selected(int32_t* selected, int64_t first, int32_t count, int64_t width,
                                              int32_t thread, int32_t threads) {
    for (int64_t slot = first + thread; slot < width; slot += threads) {
        selected[slot] = slot < count ? static_cast<int32_t>(slot) : -1;
    }
}

// Grid (G, B).
template <class Keys>
__global__ void __launch_bounds__(kTokenThreads, kTokenBlocks) select_tokens(const SelectTokensParams params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t head = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
    const AttendedRow row = attended_row(params.cache_lengths[blockIdx.y], params.limits);
    int32_t* selected = params.selected == nullptr ? nullptr : params.selected + head * params.selected_width;
    if (!row.all) {
        const int64_t units = units_of(params.pages);
        const ScoredPages pages = {params.scores + head * params.group * units * kUnitPages,
                                   params.units + head * params.group * units,
                                   units,
                                   params.group,
                                   params.page_size,
                                   row.compared(params.limits),
                                   (row.length - 1) / params.page_size + 1};
        const TokenLists lists = {params.indices + head * params.index_stride, selected};
        KVC_SHARED(HeadSoftmax, heads, KVC_LARGEST_GROUP);
        KVC_SHARED(uint32_t, histogram, kHistogramWords<kTokenCopies>);
        KVC_SHARED(uint32_t, sums, kRadixBins);
        KVC_SHARED(int32_t, shares, kEmissionWords<kTokenThreads>);
        const SelectionStorage storage = {heads, histogram, sums, shares};
        if constexpr (std::is_same_v<Keys, KeysInWorkspace>) {
            select_in_memory(pages, row.best(params.limits), params.keys + head * params.pages, storage, lists);
        } else if constexpr (std::is_same_v<Keys, KeysInShared>) {
            select_in_memory(pages, row.best(params.limits), dynamic_shared<uint32_t>(0, params.pages), storage, lists);
        } else {
            select_in_registers<Keys::kPages>(pages, row.best(params.limits), storage, lists);
        }
        lists.write_recent(row, params.limits, static_cast<int32_t>(threadIdx.x), kTokenThreads);
    }
    if (selected != nullptr) {
        fill_selected(selected, row.all ? 0 : row.count, row.count, params.selected_width,
                      static_cast<int32_t>(threadIdx.x), kTokenThreads);
    }
}

}  // namespace kvc
