// The selection of radix_select.cuh and emit_selected.cuh by a block of a cluster that has the keys of all blocks in its
// shared memory. All blocks find the same threshold, and each names what it was asked for: nothing is exchanged.
//
// Digits have 11 bits, not 8: sign, exponent and two bits more in the first, 13 bits of the fraction with the second.
// Of a thousand pages with scores of their own, two passes usually find the threshold, where digits of 8 bits take
// three. Every pass has a histogram of its own, and all are cleared ahead of the first. There is one copy of each: eight
// times as many bins spread equal exponents further than four copies of few bins do.
//
// Determinism: that of radix_select.cuh. Sums of integers do not depend on who adds them.
#pragma once

#include <cstdint>

#include "kernels/emit_selected.cuh"
#include "kernels/radix_select.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

namespace kvc {

constexpr int kWideBits = 11;
constexpr int kWideBins = 1 << kWideBits;
constexpr int kWidePasses = 3;
constexpr int kWideWords = kWidePasses * kWideBins;  // of all histograms
constexpr int kGroupBins = kWideBins / kRadixBins;   // bins that a thread adds up: a digit's last three bits

// This thread's keys, neighbours.
struct SharedKeys {
    static constexpr int kInFlight = 8;
    static constexpr int kMost = 32;  // emission has a bit for each
    SharedSpan<uint4> keys;           // of all threads
    int32_t first;                    // candidate, a multiple of kInFlight
    int32_t count;                    // at most kMost; at most 0: none

    template <class Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
#pragma unroll 1
        for (int32_t i = 0; i < count; i += kInFlight) {
            const uint4 lower = keys[(first + i) / 4], upper = keys[(first + i) / 4 + 1];
            const uint32_t own[kInFlight] = {lower.x, lower.y, lower.z, lower.w, upper.x, upper.y, upper.z, upper.w};
#pragma unroll
            for (int32_t j = 0; j < kInFlight; ++j) {
                if (i + j < count) visit(first + i + j, own[j]);
            }
        }
    }
};

// This thread's part of `count` keys. `keys` has room for a multiple of kInFlight.
template <int kThreads>
__device__ __forceinline__ SharedKeys shared_keys(SharedSpan<uint32_t> keys, int32_t count) {
    constexpr int32_t kRound = kThreads * SharedKeys::kInFlight;
    const int32_t own = (count + kRound - 1) / kRound * SharedKeys::kInFlight;
    const int32_t first = static_cast<int32_t>(threadIdx.x) * own;
    return {keys.cast<uint4>(), first, min(own, count - first)};
}

// Shared memory of the selection.
struct WideStorage {
    SharedSpan<uint32_t> histograms;  // [kWidePasses][kWideBins]
    SharedSpan<uint32_t> sums;        // [kRadixBins]
    SharedSpan<int32_t> shares;       // [kEmissionWords]
};

// Clears the histograms for a selection, which may start after a barrier.
template <int kThreads>
__device__ __forceinline__ void clear_wide_histograms(SharedSpan<uint32_t> histograms) {
    const SharedSpan<uint4> vectors = histograms.cast<uint4>();
#pragma unroll
    for (int32_t i = 0; i < kWideWords / 4 / kThreads; ++i) vectors[threadIdx.x + i * kThreads] = uint4{0, 0, 0, 0};
}

// The weights of eight neighbouring bins, the highest first.
struct BinGroup {
    int32_t weights[kGroupBins];

    __device__ __forceinline__ BinGroup(SharedSpan<uint32_t> histogram, int32_t group) {
        const SharedSpan<uint4> vectors = histogram.cast<uint4>();
        const uint4 lower = vectors[2 * group], upper = vectors[2 * group + 1];
        const uint32_t found[kGroupBins] = {upper.w, upper.z, upper.y, upper.x, lower.w, lower.z, lower.y, lower.x};
#pragma unroll
        for (int32_t i = 0; i < kGroupBins; ++i) weights[i] = static_cast<int32_t>(found[i]);
    }

    __device__ __forceinline__ int32_t total() const {
        int32_t sum = 0;
#pragma unroll
        for (int32_t i = 0; i < kGroupBins; ++i) sum += weights[i];
        return sum;
    }

    // The place of the bin at which the weight from the top reaches `quota`, the last one if all together weigh less;
    // `quota` becomes the rest for that bin, `weight` what is in it.
    __device__ __forceinline__ int32_t take(int32_t& quota, int32_t& weight) const {
        int32_t place = 0, above = 0, passed = 0;  // sums ascend, so no comparison waits for the one before
        weight = weights[0];
#pragma unroll
        for (int32_t i = 0; i + 1 < kGroupBins; ++i) {
            above += weights[i];
            if (above < quota) {
                passed = above;
                weight = weights[i + 1];
                ++place;
            }
        }
        quota -= passed;
        return place;
    }
};

// What find_threshold of radix_select.cuh finds. The caller has cleared the histograms and stored the keys, followed by
// a barrier. Two barriers in each pass.
template <int kThreads, class WeightAt>
__device__ __forceinline__ Threshold find_threshold_by_wide_digits(const SharedKeys& keys, int32_t quota,
                                                                   int32_t single, WeightAt weight_at,
                                                                   const WideStorage& storage) {
    static_assert(kThreads == kRadixBins, "every group of bins has a thread");
    if (quota <= 0) return {0xffffffffu, 0, 0xffffffffu};
    uint32_t prefix = 0, mask = 0;
#pragma unroll 1
    for (int32_t pass = 0; pass < kWidePasses; ++pass) {
        const int32_t shift = max(32 - (pass + 1) * kWideBits, 0);  // the last digit repeats a bit of the one before
        const SharedSpan<uint32_t> histogram = storage.histograms.part(pass * kWideBins, kWideBins);
        keys.for_each([&](int32_t i, uint32_t key) {
            if (((key ^ prefix) & mask) == 0) {
                atomicAdd(&histogram[(key >> shift) % kWideBins], static_cast<uint32_t>(weight_at(i)));
            }
        });
        __syncthreads();
        const auto thread = static_cast<int32_t>(threadIdx.x);
        storage.sums[kRadixBins - 1 - thread] = static_cast<uint32_t>(BinGroup(histogram, thread).total());
        __syncthreads();
        const auto group = static_cast<int32_t>(take_digit(storage.sums, quota));
        int32_t weight = 0;
        const int32_t place = BinGroup(histogram, group).take(quota, weight);
        prefix |= static_cast<uint32_t>(group * kGroupBins + kGroupBins - 1 - place) << shift;
        mask |= static_cast<uint32_t>(kWideBins - 1) << shift;
        if (weight <= single || weight <= quota) break;
    }
    return {prefix, quota, mask};
}

// Calls emit(i, slot, count) for every element that is selected, as emit_ascending does, and returns the threshold. The
// caller has cleared the histograms and passed a barrier.
template <int kThreads, class WeightAt, class Emit>
__device__ __forceinline__ Threshold select_among_all(const SharedKeys& keys, int32_t quota, int32_t single,
                                                      WeightAt weight_at, const WideStorage& storage, Emit emit) {
    const Threshold threshold = find_threshold_by_wide_digits<kThreads>(keys, quota, single, weight_at, storage);
    emit_ascending<kThreads>(keys, threshold, weight_at, storage.shares, emit);
    return threshold;
}

}  // namespace kvc
