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
    static constexpr int kInFlight = 5;
    static constexpr int kMost = 32;  // emission has a bit for each
    SharedSpan<uint32_t> keys;        // of all threads, and room for kInFlight more
    int32_t first;                    // candidate
    int32_t count;                    // at most kMost; at most 0: none

    // Calls visit(candidate, key, exists) for this thread's keys, and for some behind them that do not exist.
    template <class Visit>
    __device__ __forceinline__ void for_each_read(Visit visit) const {
#pragma unroll 1
        for (int32_t i = 0; i < count; i += kInFlight) {
            uint32_t own[kInFlight];
#pragma unroll
            for (int32_t j = 0; j < kInFlight; ++j) own[j] = keys[first + i + j];
#pragma unroll
            for (int32_t j = 0; j < kInFlight; ++j) visit(first + i + j, own[j], i + j < count);
        }
    }

    template <class Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
        for_each_read([&](int32_t i, uint32_t key, bool exists) {
            if (exists) visit(i, key);
        });
    }
};

// This thread's part of `count` keys: an odd number, while kMost allows it, so that lanes read different banks.
template <int kThreads>
__device__ __forceinline__ SharedKeys shared_keys(SharedSpan<uint32_t> keys, int32_t count) {
    const int32_t own = min((count + kThreads - 1) / kThreads | 1, SharedKeys::kMost);
    const int32_t first = static_cast<int32_t>(threadIdx.x) * own;
    return {keys, first, min(own, count - first)};
}

// The digit that one thread has found, for all.
struct alignas(16) FoundDigit {
    int32_t digit;
    int32_t quota;   // the rest for that digit
    int32_t weight;  // of all that has it
    int32_t unused;
};

// Shared memory of the selection.
struct WideStorage {
    SharedSpan<uint32_t> histograms;  // [kWidePasses][kWideBins]
    SharedSpan<int32_t> totals;       // [kRadixBins / kWarpSize]: of warps
    SharedSpan<FoundDigit> found;     // [1]
    SharedSpan<int32_t> shares;       // [kEmissionWords]
};

// Clears the histograms for a selection, which may start after a barrier.
template <int kThreads>
__device__ __forceinline__ void clear_wide_histograms(SharedSpan<uint32_t> histograms) {
    const SharedSpan<uint4> vectors = histograms.cast<uint4>();
#pragma unroll
    for (int32_t i = 0; i < kWideWords / 4 / kThreads; ++i) {
        vectors[threadIdx.x + i * kThreads] = uint4{0, 0, 0, 0};
    }
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

// Takes the digit of a histogram at which the weight from the top reaches `quota`, digit 0 if all together weigh less.
// Every thread adds up a group of bins, the first one the highest, and one finds the digit in its own. Two barriers.
template <int kThreads>
__device__ __forceinline__ FoundDigit find_wide_digit(SharedSpan<uint32_t> histogram, int32_t quota,
                                                      const WideStorage& storage) {
    static_assert(kThreads == kRadixBins, "every group of bins has a thread");
    constexpr int32_t kWarps = kThreads / kWarpSize, kWidth = 4;
    const int32_t thread = static_cast<int32_t>(threadIdx.x), group = kRadixBins - 1 - thread, warp = warp_index();
    const BinGroup own(histogram, group);
    const int32_t total = own.total();
    int32_t all = 0;
    int32_t before = warp_exclusive_scan(total, all);
    if (lane_index() == 0) storage.totals[warp] = all;
    __syncthreads();
#pragma unroll
    for (int32_t first = 0; first < kWarps; first += kWidth) {
        const int4 totals = storage.totals.cast<int4>()[first / kWidth];
        before += (first < warp ? totals.x : 0) + (first + 1 < warp ? totals.y : 0) +
                  (first + 2 < warp ? totals.z : 0) + (first + 3 < warp ? totals.w : 0);
    }
    if (before < quota && (quota <= before + total || group == 0)) {
        int32_t rest = quota - before, weight = 0;
        const int32_t place = own.take(rest, weight);
        storage.found[0] = {group * kGroupBins + kGroupBins - 1 - place, rest, weight, 0};
    }
    __syncthreads();
    return storage.found[0];
}

// What find_threshold of radix_select.cuh finds. The caller has cleared the histograms and stored the keys, followed by
// a barrier. Three barriers in each pass.
template <int kThreads, class WeightAt>
__device__ __forceinline__ Threshold find_threshold_by_wide_digits(const SharedKeys& keys, int32_t quota,
                                                                   int32_t single, WeightAt weight_at,
                                                                   const WideStorage& storage) {
    if (quota <= 0) return {0xffffffffu, 0, 0xffffffffu};
    uint32_t prefix = 0, mask = 0;
#pragma unroll 1
    for (int32_t pass = 0; pass < kWidePasses; ++pass) {
        const int32_t shift = max(32 - (pass + 1) * kWideBits, 0);  // the last digit repeats a bit of the one before
        const SharedSpan<uint32_t> histogram = storage.histograms.part(pass * kWideBins, kWideBins);
        keys.for_each_read(
            [&](int32_t i, uint32_t key, bool exists) {  // without branches: all loads and sums are under way
                const auto weight = static_cast<uint32_t>(weight_at(i));
                const uint32_t bin = (key >> shift) % kWideBins;
                if (exists && ((key ^ prefix) & mask) == 0) atomicAdd(&histogram[bin], weight);
            });
        __syncthreads();
        const FoundDigit found = find_wide_digit<kThreads>(histogram, quota, storage);
        quota = found.quota;
        prefix |= static_cast<uint32_t>(found.digit) << shift;
        mask |= static_cast<uint32_t>(kWideBins - 1) << shift;
        if (found.weight <= single || found.weight <= quota) break;
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
