// The softmax of page scores over the tokens of a row, in two steps: statistics of every unit of pages, by the blocks
// that score them, and of all units, by the block that selects.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3, step 7 of hybrid attention: a softmax over tokens, so that a page's
// score counts once for each of its tokens.
//
//   unit_statistics   (page_scores.cuh)    maximum of a unit's scores, and sum of tokens · exp(score - maximum)
//   head_softmax      (select_tokens.cuh)  the maximum of all units of a row, and 1 / their sum, for every head
//
// A maximum ignores NaN, which shows in the sum. -inf adds nothing to a sum, nor does a unit that has nothing else. So
// the sum of a head is NaN if a score is NaN or +inf; if all scores are -inf, its maximum is -inf and its sum 0. In
// both cases exp(score - maximum) · (1 / sum) is NaN for every page.
//
// Bytes per KV head: 8 g P / kUnitPages, written once and read twice (L2, then L1). Exponentials: g P +
// g P / kUnitPages.
//
// Determinism: a unit is pages u · kUnitPages to (u + 1) · kUnitPages - 1 of the row, whatever chunk of pages a block
// has, and added in a fixed tree. How units are split into parts follows from their number and g. So the bits depend
// on the row alone, not on the capacity or the batch.
#pragma once

#include <cstdint>

#include "kernels/platform.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

namespace kvc {

// Divides the pages of every block that scores. Rows of scores are whole units, so that they start at a multiple of 32
// bytes.
constexpr int kUnitPages = 8;

// Of one head's scores of some pages.
struct alignas(8) ScoreStatistics {
    float maximum;
    float sum;  // of tokens · exp(score - maximum)
};

// The softmax of one head over all tokens of a row: a token of a page has the share exp(score - maximum) · scale.
struct alignas(8) HeadSoftmax {
    float maximum;
    float scale;  // 1 / sum
};

__host__ __device__ __forceinline__ int32_t units_of(int32_t pages) { return (pages + kUnitPages - 1) / kUnitPages; }

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// The number that exponents are relative to: the maximum, but never -inf, because -inf - -inf is NaN.
__device__ __forceinline__ float exponent_base(float maximum) { return maximum == minus_infinity() ? 0.0f : maximum; }

// Tokens in the pages of a row; the last one may be partial.
struct PageTokens {
    int32_t last;  // page
    float in_last;
    float in_others;

    __device__ __forceinline__ float of(int32_t page) const { return page == last ? in_last : in_others; }
};

// Statistics of the units whose pages are those of kUnitPages / kPages neighbouring lanes, kPages each, of kTiles tiles; a
// page past the row's end has the score -inf. By all lanes of a warp, step by step for all tiles: their shuffles are
// under way together.
template <int kTiles, int kPages>
__device__ __forceinline__ void unit_statistics(const float (&scores)[kTiles][kPages],
                                                const float (&tokens)[kTiles][kPages],
                                                ScoreStatistics (&units)[kTiles]) {
    constexpr int kLanes = kUnitPages / kPages;
    static_assert(kLanes * kPages == kUnitPages && kLanes <= kWarpSize, "lanes share a unit evenly");
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        units[tile] = {scores[tile][0], 0.0f};
#pragma unroll
        for (int i = 1; i < kPages; ++i) {
            units[tile].maximum = fmaxf(units[tile].maximum, scores[tile][i]);
        }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            units[tile].maximum = fmaxf(units[tile].maximum, __shfl_xor_sync(kFullWarp, units[tile].maximum, step));
        }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        const float base = exponent_base(units[tile].maximum);
#pragma unroll
        for (int i = 0; i < kPages; ++i) {
            units[tile].sum += tokens[tile][i] * expf(scores[tile][i] - base);
        }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            units[tile].sum += __shfl_xor_sync(kFullWarp, units[tile].sum, step);
        }
    }
}

// Calls visit(i) for first, first + step, ... below `end`, in that order, four at a time while there are as many. A loop
// that the compiler takes apart itself divides by `step` first.
template <class Visit>
__device__ __forceinline__ void for_each_step(int32_t first, int32_t end, int32_t step, const Visit& visit) {
    int32_t i = first;
#pragma unroll 1
    for (; i + 3 * step < end; i += 4 * step) {
        visit(i);
        visit(i + step);
        visit(i + 2 * step);
        visit(i + 3 * step);
    }
#pragma unroll 1
    for (; i < end; i += step) {
        visit(i);
    }
}

// Largest maximum of the parts first, first + step, ... below `end`.
template <class Parts>
__device__ __forceinline__ float largest_maximum(const Parts& parts, int32_t first, int32_t end, int32_t step) {
    float maximum = minus_infinity();
    for_each_step(first, end, step, [&](int32_t i) { maximum = fmaxf(maximum, parts[i].maximum); });
    return maximum;
}

// Sum of the parts first, first + step, ... below `end`, relative to their `maximum`.
template <class Parts>
__device__ __forceinline__ float sum_of_parts(const Parts& parts, int32_t first, int32_t end, int32_t step,
                                              float maximum) {
    const float base = exponent_base(maximum);
    float sum = 0.0f;
    for_each_step(first, end, step, [&](int32_t i) { sum += parts[i].sum * expf(parts[i].maximum - base); });
    return sum;
}

// The units of one head that a warp adds up: those of its lanes, one in `step`.
struct UnitPart {
    const ScoreStatistics* units;
    int32_t first;  // of this lane
    int32_t end;
    int32_t step;

    __device__ __forceinline__ float maximum() const { return largest_maximum(units, first, end, step); }
    __device__ __forceinline__ float sum(float maximum) const { return sum_of_parts(units, first, end, step, maximum); }
};

// The softmax of every head, from the statistics of its units [g, stride], `count` of them in a row -> heads [g].
// kParts: the most parts into which the units of all heads are divided, each added up by a warp; the bits depend on it.
// Two barriers, the last one after the result is written.
template <int kThreads, int kParts = kThreads / kWarpSize>
__device__ __forceinline__ void head_softmax(const ScoreStatistics* units, int64_t stride, int32_t count, int32_t group,
                                             SharedSpan<HeadSoftmax> heads) {
    constexpr int kWarps = kThreads / kWarpSize;
    static_assert(kParts == kWarps || kParts == 2 * kWarps, "a warp has one part or two");
    KVC_SHARED(ScoreStatistics, of_parts, kParts);
    const int parts = min(kParts / group, (count + kWarpSize - 1) / kWarpSize);  // of one head
    const auto part_at = [&](int part, int32_t end) -> UnitPart {
        return {units + part / parts * stride, part % parts * kWarpSize + lane_index(), end, parts * kWarpSize};
    };
    const int own = warp_index(), other = own + kWarps;
    if (own < group * parts) {
        const UnitPart part = part_at(own, count);
        if constexpr (kParts == kWarps) {
            const float maximum = warp_max(part.maximum());
            const float sum = warp_sum(part.sum(maximum));
            if (lane_index() == 0) {
                of_parts[own] = {maximum, sum};
            }
        } else {  // step by step for both, so that their shuffles are under way together
            const UnitPart second = part_at(other, other < group * parts ? count : 0);
            float maximum = part.maximum(), second_maximum = second.maximum();
            maximum = warp_max(maximum);
            second_maximum = warp_max(second_maximum);
            float sum = part.sum(maximum), second_sum = second.sum(second_maximum);
            sum = warp_sum(sum);
            second_sum = warp_sum(second_sum);
            if (lane_index() == 0) {
                of_parts[own] = {maximum, sum};
                of_parts[other] = {second_maximum, second_sum};
            }
        }
    }
    __syncthreads();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < group) {
        const float maximum = largest_maximum(of_parts, thread * parts, (thread + 1) * parts, 1);
        heads[thread] = {maximum, 1.0f / sum_of_parts(of_parts, thread * parts, (thread + 1) * parts, 1, maximum)};
    }
    __syncthreads();
}

}  // namespace kvc
