// The rank of pages: their share of attention, as order keys.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3, step 7 of hybrid attention: f[x] = mean over the group, head 0
// first, of exp(score - maximum) / sum, the softmax over tokens of e[h, page of x] / T[h] (page_statistics.cuh).
//
// As in the ONNX body, exponentials are multiplied by 1 / sum, rounded once per head, and shares are not divided by the
// group. This can change the choice only at a near-tie:
//   - Pages whose scores have the same bits in every head get the same key: an exact tie stays one. The same holds for
//     two pages whose scores are equal except that two heads are exchanged, if these heads have equal sums.
//   - Within a head, 1 / sum is a factor that all pages share. Rounding a product never turns an order; it may make
//     neighbours equal, as rounding a quotient does.
//   - Between heads, shares move by at most 2^-24 of themselves against each other for 1 / sum, and as much for the
//     product; a near-tie may be apart by 2^-20 (1 + M).
#pragma once

#include <cstdint>

#include "kernels/numeric.cuh"
#include "kernels/page_statistics.cuh"
#include "kernels/platform.cuh"
#include "kernels/shared.cuh"

namespace kvc {

// The scored pages of one row and KV head.
struct ScoredPages {
    const float* scores;           // [g,8U]
    const ScoreStatistics* units;  // [g,U]
    int64_t row_units;             // U
    int32_t group;                 // g
    int32_t page_size;             // p
    int32_t compared;              // tokens that are compared: m without the last ones that are read in any case
    int32_t count;                 // ceil(m / p)

    // Tokens of a page that are compared: a part of the page where the last one ends, and none behind it.
    // (Unsigned: of pages that do not exist nobody uses the weight, but it may be computed.)
    __device__ __forceinline__ int32_t weight(int32_t page) const {
        const auto before = static_cast<uint32_t>(page) * static_cast<uint32_t>(page_size);
        const auto left = static_cast<int32_t>(static_cast<uint32_t>(compared) - before);
        return min(max(left, 0), page_size);
    }
};

// Scores of kPages neighbouring pages, for as many heads as a thread reads at once: 16 scores.
template <int kPages>
struct ScoreTile {
    static_assert(kUnitPages % kVectorWidth<float> == 0 && kPages % kVectorWidth<float> == 0, "rows end with a vector");
    static constexpr int kHeads = 16 / kPages;
    float value[kHeads][kPages];

    // Loads pages from first_page on and heads from first_head on; past the last one, the contents are undefined.
    __device__ __forceinline__ void read(const ScoredPages& pages, int32_t first_page, int first_head) {
        constexpr int kWidth = kVectorWidth<float>;
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            const float* row = pages.scores + (first_head + i) * pages.row_units * kUnitPages + first_page;
#pragma unroll
            for (int j = 0; j < kPages; j += kWidth) {
                float vector[kWidth] = {};
                if (first_head + i < pages.group && first_page + j < pages.count) {
                    load_vector(row + j, vector);
                }
#pragma unroll
                for (int k = 0; k < kWidth; ++k) {
                    value[i][j + k] = vector[k];
                }
            }
        }
    }
};

// Order keys of the kPages pages from first_page on. `scores` holds the scores of the first heads and is overwritten.
template <int kPages>
__device__ __forceinline__ void rank_pages(const ScoredPages& pages, SharedSpan<HeadSoftmax> heads, int32_t first_page,
                                           ScoreTile<kPages>& scores, uint32_t (&keys)[kPages]) {
    constexpr int kHeads = ScoreTile<kPages>::kHeads;
    float shares[kPages] = {};
#pragma unroll 1
    for (int first = 0; first < pages.group; first += kHeads) {
        if (first > 0) {
            scores.read(pages, first_page, first);
        }
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            const bool exists = first + i < pages.group;  // without a branch: exponentials of all heads are under way
            const HeadSoftmax head = heads[exists ? first + i : first];
#pragma unroll
            for (int j = 0; j < kPages; ++j) {
                const float sum = shares[j] + expf(scores.value[i][j] - head.maximum) * head.scale;
                shares[j] = exists ? sum : shares[j];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < kPages; ++j) {
        keys[j] = order_key(shares[j]);
    }
}

}  // namespace kvc
