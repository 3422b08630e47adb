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
#include "kvc/limits.h"

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

// Parts first, first + step, ... below `end` of a head's units, or of what warps have added up. The first kHeld are read
// at once and kept: their maximum is needed before their sum. Of what is missing there is a maximum of -inf and a sum of 0,
// which change nothing.
template <int kHeld, class Parts>
struct HeldParts {
    const Parts parts;
    int32_t first;
    int32_t end;
    int32_t step;
    ScoreStatistics held[kHeld];

    __device__ __forceinline__ HeldParts(const Parts& of, int32_t from, int32_t to, int32_t by)
        : parts(of), first(from), end(to), step(by) {
#pragma unroll
        for (int32_t i = 0; i < kHeld; ++i) {
            held[i] = {minus_infinity(), 0.0f};
            if (first + i * step < end) {
                held[i] = parts[first + i * step];
            }
        }
    }

    __device__ __forceinline__ float maximum() const {
        float largest = minus_infinity();
#pragma unroll
        for (int32_t i = 0; i < kHeld; ++i) {
            largest = fmaxf(largest, held[i].maximum);
        }
#pragma unroll 1
        for (int32_t i = first + kHeld * step; i < end; i += step) {
            largest = fmaxf(largest, parts[i].maximum);
        }
        return largest;
    }

    // Relative to `maximum`, in ascending order.
    __device__ __forceinline__ float sum(float maximum) const {
        const float base = exponent_base(maximum);
        float sum = 0.0f;
#pragma unroll
        for (int32_t i = 0; i < kHeld; ++i) {
            sum += held[i].sum * expf(held[i].maximum - base);
        }
#pragma unroll 1
        for (int32_t i = first + kHeld * step; i < end; i += step) {
            sum += parts[i].sum * expf(parts[i].maximum - base);
        }
        return sum;
    }
};

// `value` / `divisor` of numbers up to 16 and from 1 to 16: a division by what the compiler does not know takes the time of
// two loads from shared memory. 256 / divisor is rounded up, and its bytes less one are in two words.
__host__ __device__ __forceinline__ constexpr int small_quotient(int value, int divisor) {
    const uint64_t inverses = divisor <= 8 ? 0x1f242a333f557fffull : 0x0f1112131517191cull;
    return value * (static_cast<int>(inverses >> (divisor - 1) % 8 * 8 & 0xffu) + 1) >> 8;
}
constexpr bool small_quotients_are_exact() {
    for (int value = 0; value <= 16; ++value) {
        for (int divisor = 1; divisor <= 16; ++divisor) {
            if (small_quotient(value, divisor) != value / divisor) return false;
        }
    }
    return true;
}
static_assert(small_quotients_are_exact());

// The softmax of every head, from the statistics of its units [g, stride], `count` of them in a row -> heads [g].
// kParts: the most parts into which the units of all heads are divided, each added up by a warp; the bits depend on it.
// kHeld: units of a lane that are read at once; no bits depend on it.
// Two barriers, the last one after the result is written.
template <int kThreads, int kHeld, int kParts = kThreads / kWarpSize>
__device__ __forceinline__ void head_softmax(const ScoreStatistics* units, int64_t stride, int32_t count, int32_t group,
                                             SharedSpan<HeadSoftmax> heads) {
    constexpr int kWarps = kThreads / kWarpSize;
    static_assert(kParts == kWarps || kParts == 2 * kWarps, "a warp has one part or two");
    static_assert(kParts <= 16 && KVC_LARGEST_GROUP <= 16, "small_quotient divides them");
    using Part = HeldParts<kHeld, const ScoreStatistics*>;
    KVC_SHARED(ScoreStatistics, of_parts, kParts);
    const int parts = min(small_quotient(kParts, group), (count + kWarpSize - 1) / kWarpSize);  // of one head
    const auto part_at = [&](int part, int32_t end) -> Part {
        const int head = small_quotient(part, parts);
        return {units + head * stride, (part - head * parts) * kWarpSize + lane_index(), end, parts * kWarpSize};
    };
    const int own = warp_index(), other = own + kWarps;
    if (own < group * parts) {
        const Part part = part_at(own, count);
        if constexpr (kParts == kWarps) {
            const float maximum = warp_max(part.maximum());
            const float sum = warp_sum(part.sum(maximum));
            if (lane_index() == 0) {
                of_parts[own] = {maximum, sum};
            }
        } else {  // step by step for both, so that their shuffles are under way together
            const Part second = part_at(other, other < group * parts ? count : 0);
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
        constexpr int kHeldParts = 4;
        const HeldParts<kHeldParts, SharedSpan<ScoreStatistics>> all(of_parts, thread * parts, (thread + 1) * parts, 1);
        const float maximum = all.maximum();
        heads[thread] = {maximum, 1.0f / all.sum(maximum)};
    }
    __syncthreads();
}

}  // namespace kvc
