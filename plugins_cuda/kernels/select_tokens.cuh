// Which tokens a decode step reads: the best pages by their share of attention, cut to top_k tokens. Also raises the
// bounds of the page that the step's token joined, which page_scores.cuh must find as they were.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3, steps 7 and 8 of hybrid attention: f[x] = mean over the group, head 0
// first, of the softmax over tokens of e[h, page of x] / T[h]; top_k tokens by (f descending, x ascending). Tokens of a
// page share one score, so pages are ranked by weight (radix_select.cuh) and the last one gives its lowest tokens.
//
//   in   scores fp32 [B,G,H/G,8U] of page_scores.cuh and the statistics of their units [B,G,H/G,U], k_new [B,G,D]
//   out  bounds [B,G,2D,P] raised by the new key;
//        indices int32 [B,G,index_stride]: the top_k slots of a row that does not read all its entries, ascending;
//        selected int32 [B,G,selected_width], or null: the same for the caller, 0..m-1 for other rows, -1 past the end
//
// One block per (row, KV head), grid (G, B): a softmax and a selection over 500 to 4300 pages is latency, not work.
// The softmax comes from statistics of units of pages (page_statistics.cuh), so scores are read once, every thread taking
// pages of its own. Keys stay in shared memory up to kMostSharedPages pages, else in the workspace.
//
// A score of NaN or +inf makes the head's share NaN everywhere, hence f of every page: all rank equally low, and the
// lowest slots are read. So do scores that are all -inf.
//
// Bytes per KV head: 4 g P read, 4 top_k written, twice with `selected`; 2D sectors of 32 bytes of bounds, read while the
// selection runs and written at its end. Exponentials: g P.
//
// Determinism: a row's pages and their statistics depend on the row alone; pages past its end take no part, so neither
// the capacity nor the batch changes a bit. Equal scores give equal keys.
#pragma once

#include <cstdint>

#include "kernels/append.cuh"
#include "kernels/attended_row.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/numeric.cuh"
#include "kernels/page_statistics.cuh"
#include "kernels/platform.cuh"
#include "kernels/radix_select.cuh"
#include "kernels/reduce.cuh"
#include "kernels/score_channels.cuh"
#include "kernels/shared.cuh"

namespace kvc {

constexpr int kTokenThreads = 512;
constexpr int kTokenWarps = kTokenThreads / kWarpSize;
constexpr int kTokenCopies = 8;              // histograms of the radix selection, see there
constexpr int kMostSharedPages = 16 * 1024;  // 64 KiB of keys
static_assert(kTokenWarps >= KVC_LARGEST_GROUP, "every head has a warp");
static_assert(kTokenThreads >= 2 * KVC_LARGEST_HEAD_SIZE, "every bound of a page has a thread");

template <class T>
struct SelectTokensParams {
    const float* scores;           // [B,G,H/G,8U]
    const ScoreStatistics* units;  // [B,G,H/G,U] of the scores
    const T* k_new;                // [B,G,D]
    T* bounds;                     // [B,G,2D,P]
    const int64_t* cache_lengths;  // [B]: entries before the append
    uint32_t* keys;                // [B,G,P]; unused where they fit in shared memory
    int32_t* indices;              // [B,G,index_stride]
    int32_t* selected;             // [B,G,selected_width] or null
    AttentionLimits limits;
    int64_t index_stride;
    int64_t selected_width;
    int32_t group;      // H/G
    int32_t page_size;  // p
    int32_t pages;      // P
    int32_t head_size;  // D
};

// The scored pages of one row and KV head.
struct ScoredPages {
    const float* scores;           // [g,8U]
    const ScoreStatistics* units;  // [g,U]
    int64_t row_units;             // U
    int32_t group;                 // g
    int32_t page_size;             // p
    int32_t length;                // m
    int32_t count;                 // ceil(m / p)

    // Tokens in a page; the last one may be partial.
    __device__ __forceinline__ int32_t weight(int32_t page) const {
        const int32_t left = length - page * page_size;
        return left < page_size ? left : page_size;
    }
};

// f of a page as an order key. Scores of several heads are under way together.
__device__ __forceinline__ uint32_t page_key(const ScoredPages& pages, SharedSpan<ScoreStatistics> heads,
                                             int32_t page) {
    constexpr int kInFlight = 4;
    float total = 0.0f;
#pragma unroll 1
    for (int first = 0; first < pages.group; first += kInFlight) {
        float scores[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            scores[i] =
                first + i < pages.group ? pages.scores[(first + i) * pages.row_units * kUnitPages + page] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (first + i < pages.group) {
                total += expf(scores[i] - heads[first + i].maximum) / heads[first + i].sum;
            }
        }
    }
    return order_key(total / static_cast<float>(pages.group));
}

// Where the chosen tokens go.
struct TokenLists {
    int32_t* indices;
    int32_t* selected;  // or null

    __device__ __forceinline__ void write(int32_t token, int32_t slot) const {
        indices[slot] = token;
        if (selected != nullptr) {
            selected[slot] = token;
        }
    }
};

// Ranks the pages and writes the best `quota` tokens; `keys` is indexed by page.
template <class Keys>
__device__ __forceinline__ void select_best(const ScoredPages& pages, int32_t quota, Keys keys,
                                            const TokenLists& lists) {
    KVC_SHARED(ScoreStatistics, heads, KVC_LARGEST_GROUP);
    KVC_SHARED(uint32_t, histogram, kHistogramWords<kTokenCopies>);
    KVC_SHARED(uint32_t, sums, kRadixBins);
    KVC_SHARED(int32_t, shares, kEmissionWords<kTokenThreads>);
    head_softmax<kTokenThreads>(pages.units, pages.row_units, units_of(pages.count), pages.group, heads);
    for (int32_t page = static_cast<int32_t>(threadIdx.x); page < pages.count; page += kTokenThreads) {
        keys[page] = page_key(pages, heads, page);
    }
    const auto key_at = [&](int32_t page) { return keys[page]; };
    const auto weight_at = [&](int32_t page) { return pages.weight(page); };
    const auto emit = [&](int32_t page, int32_t slot, int32_t count) {
#pragma unroll 1  // inlined once for every page in flight: unrolled, the kernel is 100 KiB of instructions
        for (int32_t i = 0; i < count; ++i) {
            lists.write(page * pages.page_size + i, slot + i);
        }
    };
    const Threshold threshold =
        find_threshold<kTokenThreads, kTokenCopies>(pages.count, quota, key_at, weight_at, histogram, sums);
    emit_ascending<kTokenThreads>(pages.count, threshold, key_at, weight_at, shares, emit);
}

// The bound that this thread raises, if any.
template <class T>
struct RaisedBound {
    T* element;  // null: none
    float before;
};

// Starts to read it.
template <class T>
__device__ __forceinline__ RaisedBound<T> read_bound(const SelectTokensParams<T>& params, const AttendedRow& row,
                                                     int64_t head) {
    const int thread = static_cast<int>(threadIdx.x);
    if (row.length == 0 || thread >= 2 * params.head_size) {
        return {nullptr, 0.0f};
    }
    const int page = (row.length - 1) / params.page_size;
    T* element = params.bounds + (head * 2 * params.head_size + thread) * params.pages + page;
    return {element, to_float(*element)};
}

// Writes 0..count-1 and then -1, from slot `first` on.
__device__ __forceinline__ void fill_selected(int32_t* selected, int64_t first, int32_t count, int64_t width) {
    for (int64_t slot = first + static_cast<int32_t>(threadIdx.x); slot < width; slot += kTokenThreads) {
        selected[slot] = slot < count ? static_cast<int32_t>(slot) : -1;
    }
}

// Grid (G, B).
template <class T, bool kSharedKeys>
__global__ void __launch_bounds__(kTokenThreads) select_tokens(const SelectTokensParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t head = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
    const AttendedRow row = attended_row(params.cache_lengths[blockIdx.y], params.limits);
    const RaisedBound<T> bound = read_bound(params, row, head);
    int32_t* selected = params.selected == nullptr ? nullptr : params.selected + head * params.selected_width;
    if (!row.all) {
        const int64_t units = units_of(params.pages);
        const ScoredPages pages = {params.scores + head * params.group * units * kUnitPages,
                                   params.units + head * params.group * units,
                                   units,
                                   params.group,
                                   params.page_size,
                                   row.length,
                                   (row.length - 1) / params.page_size + 1};
        const TokenLists lists = {params.indices + head * params.index_stride, selected};
        if constexpr (kSharedKeys) {
            select_best(pages, row.count, dynamic_shared<uint32_t>(0, params.pages), lists);
        } else {
            select_best(pages, row.count, params.keys + head * params.pages, lists);
        }
    }
    if (selected != nullptr) {
        fill_selected(selected, row.all ? 0 : row.count, row.count, params.selected_width);
    }
    if (bound.element != nullptr) {
        const T* k_new = params.k_new + head * params.head_size;
        const float raised = raised_bound(bound.before, k_new, static_cast<int>(threadIdx.x), params.head_size);
        *bound.element = from_float<T>(raised);
    }
}

}  // namespace kvc
