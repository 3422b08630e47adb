// Block-wide selection of the best by total weight, and its emission in ascending order of index.
//
// Rule: value descending, index ascending; NaN below everything. Values arrive as 32-bit order keys (`order_key`), so
// the selection is exact: in any order of the threads there is one threshold key, and equal keys are served by index.
// This is the top-k of RocketKV (arXiv 2502.14051, both stages) under the tie rule that the reference defines.
//
//   find_threshold   the key of the last element that gets a share of `quota`: larger keys weigh less than quota in
//                    total, larger and equal ones at least quota. `ties` is what is left for the equal ones.
//   emit_ascending   calls emit(index, slot, count) once for every selected element: its output starts at `slot`. Equal
//                    keys are served in ascending order of index until `ties` is used up, the last one with a part.
//
// n in 1..2^20 elements of integer weight >= 0, total below 2^31. Called by all kThreads threads of the block with
// the same arguments; key_at(i) and weight_at(i) must give the same answer whenever they are asked.
//
// Cost: four radix passes of 8 bits and two passes of emission, so 6·4·n bytes of keys, read by one block. Up to about
// 40K keys stay in the L1 cache after the first pass. Two barriers a pass.
//
// Contention: equal values are structural here. Max-pooling makes plateaus of hundreds of equal keys, and the top digit
// is the exponent, so a warp often adds 32 times to one bin, which shared memory serialises. Hence kCopies histograms,
// interleaved: lane l adds to copy l % kCopies of its bin, in another bank than its neighbours'. With 32
// copies (32 KiB) no two lanes of a warp ever collide, for any data and any weights; aggregating within the warp by
// match or leader election costs instructions on every key and helps only where values repeat. Small n: fewer copies,
// as clearing and adding up the copies is then what a pass costs.
//
// Determinism: the only atomics add integers to histograms; every other step has a fixed order.
#pragma once

#include <cstdint>

#include "kernels/platform.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

namespace kvc {

constexpr int kRadixBits = 8;
constexpr int kRadixBins = 1 << kRadixBits;

// Words of shared memory of find_threshold's histogram; its `sums` have kRadixBins and start at a multiple of 16 bytes.
template <int kCopies>
constexpr int kHistogramWords = kRadixBins * kCopies;

// Words of shared memory of emit_ascending, none of them in use by anyone when it is called.
template <int kThreads>
constexpr int kEmissionWords = 2 * (kThreads / kWarpSize);

struct Threshold {
    uint32_t key;
    int32_t ties;  // weight that elements of exactly this key still get, in ascending order of index
};

struct UnitWeight {
    __device__ __forceinline__ int32_t operator()(int32_t) const { return 1; }
};

// Adds the weight of every key that agrees with `prefix` under `mask` to the bin of its digit at `shift`.
template <int kThreads, int kCopies, class KeyAt, class WeightAt>
__device__ __forceinline__ void count_digits(int32_t n, uint32_t prefix, uint32_t mask, int32_t shift, KeyAt key_at,
                                             WeightAt weight_at, SharedSpan<uint32_t> histogram) {
    constexpr int32_t kInFlight = 8;  // loads before the first use: the keys of a long prompt come from L2
    const int32_t thread = threadIdx.x;
    const int32_t copy = thread % kCopies;
    for (int32_t base = thread; base < n; base += kThreads * kInFlight) {
        uint32_t keys[kInFlight];
#pragma unroll
        for (int32_t j = 0; j < kInFlight; ++j) {
            const int32_t i = base + j * kThreads;
            keys[j] = i < n ? key_at(i) : ~prefix;
        }
#pragma unroll
        for (int32_t j = 0; j < kInFlight; ++j) {
            const int32_t i = base + j * kThreads;
            if (i < n && ((keys[j] ^ prefix) & mask) == 0) {
                const uint32_t digit = (keys[j] >> shift) % kRadixBins;
                atomicAdd(&histogram[digit * kCopies + copy], static_cast<uint32_t>(weight_at(i)));
            }
        }
    }
}

// sums[i] = weight in bin 255 - i; clears the histogram for the next pass.
template <int kThreads, int kCopies>
__device__ __forceinline__ void add_copies(SharedSpan<uint32_t> histogram, SharedSpan<uint32_t> sums) {
    for (int32_t word = threadIdx.x; word < kRadixBins * kCopies; word += kThreads) {
        uint32_t weight = histogram[word];
        histogram[word] = 0;
        for (int32_t step = 1; step < kCopies; step *= 2) weight += __shfl_xor_sync(kFullWarp, weight, step);
        if (word % kCopies == 0) sums[kRadixBins - 1 - word / kCopies] = weight;
    }
}

// The highest digit at which the weight from the top reaches `quota`, which becomes what is left of it for that digit;
// digit 0 if all together weigh less. Every warp finds it for itself, which saves a barrier.
__device__ __forceinline__ uint32_t take_digit(SharedSpan<uint32_t> sums, int32_t& quota) {
    constexpr int32_t kBinsPerLane = kRadixBins / kWarpSize;
    const int32_t lane = lane_index();
    int32_t weights[kBinsPerLane];
    int32_t total = 0;
#pragma unroll
    for (int32_t j = 0; j < kBinsPerLane; j += 4) {
        const uint4 four = sums.cast<uint4>()[(lane * kBinsPerLane + j) / 4];
        weights[j] = static_cast<int32_t>(four.x);
        weights[j + 1] = static_cast<int32_t>(four.y);
        weights[j + 2] = static_cast<int32_t>(four.z);
        weights[j + 3] = static_cast<int32_t>(four.w);
        total += weights[j] + weights[j + 1] + weights[j + 2] + weights[j + 3];
    }
    int32_t all = 0;
    int32_t before = warp_exclusive_scan(total, all);
    const bool here = before < quota && (quota <= before + total || lane == kWarpSize - 1);
    int32_t passed = 0;
#pragma unroll
    for (int32_t j = 0; j + 1 < kBinsPerLane; ++j) {
        if (passed == j && before + weights[j] < quota) {
            before += weights[j];
            ++passed;
        }
    }
    const int32_t owner = __ffs(static_cast<int32_t>(__ballot_sync(kFullWarp, here))) - 1;
    quota -= __shfl_sync(kFullWarp, before, owner);
    return static_cast<uint32_t>(kRadixBins - 1 - __shfl_sync(kFullWarp, lane * kBinsPerLane + passed, owner));
}

// Barriers: one before the storage is touched (so keys written by the block before the call are seen), one after it is
// cleared, two in each of the four passes. A quota <= 0 selects nothing; one beyond the total weight, everything.
template <int kThreads, int kCopies, class KeyAt, class WeightAt>
__device__ Threshold find_threshold(int32_t n, int32_t quota, KeyAt key_at, WeightAt weight_at,
                                    SharedSpan<uint32_t> histogram, SharedSpan<uint32_t> sums) {
    static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024, "whole warps, at most one block");
    static_assert(kCopies >= 1 && kCopies <= kWarpSize && (kCopies & (kCopies - 1)) == 0, "copies divide a warp");
    __syncthreads();
    if (quota <= 0) return {0xffffffffu, 0};
    for (int32_t word = threadIdx.x; word < kRadixBins * kCopies; word += kThreads) histogram[word] = 0;
    __syncthreads();
    uint32_t prefix = 0;
    uint32_t mask = 0;
    for (int32_t shift = 32 - kRadixBits; shift >= 0; shift -= kRadixBits) {
        count_digits<kThreads, kCopies>(n, prefix, mask, shift, key_at, weight_at, histogram);
        __syncthreads();
        add_copies<kThreads, kCopies>(histogram, sums);
        __syncthreads();
        prefix |= take_digit(sums, quota) << shift;
        mask |= static_cast<uint32_t>(kRadixBins - 1) << shift;
    }
    return {prefix, quota};
}

// Weight of the selected candidates: those above the threshold, and those equal to it.
struct Share {
    int32_t larger = 0;
    int32_t equal = 0;

    // Slots taken by candidates of this share; at most `ties` of the equal ones get one.
    __device__ __forceinline__ int32_t slots(int32_t ties) const { return larger + (equal < ties ? equal : ties); }
    __device__ __forceinline__ Share operator+(Share other) const {
        return {larger + other.larger, equal + other.equal};
    }
};

template <class WeightAt>
__device__ __forceinline__ Share share_of(uint32_t key, uint32_t threshold, int32_t i, WeightAt weight_at) {
    Share share;
    if (key > threshold) share.larger = weight_at(i);
    if (key == threshold) share.equal = weight_at(i);
    return share;
}

// What the warps before this one select. One barrier.
template <int kThreads>
__device__ __forceinline__ Share share_before_warp(Share own, SharedSpan<int32_t> storage) {
    constexpr int32_t kWarps = kThreads / kWarpSize;
    const int32_t lane = lane_index();
    const int32_t warp = warp_index();
    own = {warp_sum(own.larger), warp_sum(own.equal)};
    if (lane == 0) {
        storage[warp] = own.larger;
        storage[kWarps + warp] = own.equal;
    }
    __syncthreads();
    return {warp_sum(lane < warp ? storage[lane] : 0), warp_sum(lane < warp ? storage[kWarps + lane] : 0)};
}

// Emits the selected of a warp's neighbours, one per lane; `before` grows by what they take.
template <class Emit>
__device__ __forceinline__ void emit_neighbours(int32_t i, Share own, int32_t ties, Share& before, Emit emit) {
    if (!__any_sync(kFullWarp, own.larger + own.equal > 0)) return;
    Share all;
    const Share below = {warp_exclusive_scan(own.larger, all.larger), warp_exclusive_scan(own.equal, all.equal)};
    const Share until = before + below;
    const int32_t slot = until.slots(ties);
    const int32_t count = (until + own).slots(ties) - slot;
    if (count > 0) emit(i, slot, count);
    before = before + all;
}

// Every warp owns a contiguous part of the candidates: it adds up what the part selects, learns what the parts before
// it select (the one barrier), and walks the part once more. Ends without a barrier.
template <int kThreads, class KeyAt, class WeightAt, class Emit>
__device__ void emit_ascending(int32_t n, Threshold threshold, KeyAt key_at, WeightAt weight_at,
                               SharedSpan<int32_t> storage, Emit emit) {
    constexpr int32_t kInFlight = 8;
    constexpr int32_t kWarps = kThreads / kWarpSize;
    const int32_t part = (n + kWarps * kWarpSize - 1) / (kWarps * kWarpSize) * kWarpSize;
    const int32_t first = warp_index() * part;
    const int32_t last = first + part < n ? first + part : n;

    Share own;
#pragma unroll kInFlight
    for (int32_t i = first + lane_index(); i < last; i += kWarpSize) {
        own = own + share_of(key_at(i), threshold.key, i, weight_at);
    }
    Share before = share_before_warp<kThreads>(own, storage);
    for (int32_t base = first; base < last; base += kWarpSize * kInFlight) {
        Share shares[kInFlight];
#pragma unroll
        for (int32_t j = 0; j < kInFlight; ++j) {
            const int32_t i = base + j * kWarpSize + lane_index();
            if (i < last) shares[j] = share_of(key_at(i), threshold.key, i, weight_at);
        }
#pragma unroll
        for (int32_t j = 0; j < kInFlight; ++j) {
            emit_neighbours(base + j * kWarpSize + lane_index(), shares[j], threshold.ties, before, emit);
        }
    }
}

}  // namespace kvc
