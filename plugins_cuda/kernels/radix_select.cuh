// Block-wide selection of the best by total weight. emit_selected.cuh then names them in ascending order of index.
//
// Rule: value descending, index ascending; NaN below everything. Values arrive as 32-bit order keys (`order_key`), so
// the selection is exact: in any order of the threads there is one threshold key, and equal keys are served by index.
// This is the top-k of RocketKV (arXiv 2502.14051, both stages) under the tie rule that the reference defines.
//
//   find_threshold   the key of the last element that gets a share of `quota`, or enough of its bits to set it apart:
//                    larger keys weigh less than quota in total, larger and equal ones at least quota. `ties` is the
//                    rest of the quota, for the equal ones.
//
// n in 1..2^20 elements of integer weight >= 0, total below 2^31. Called by all kThreads threads of the block with
// the same arguments; key_at(i) and weight_at(i) must give the same answer whenever they are asked.
//
// Cost: up to four radix passes of 8 bits, with two barriers each. They end where a digit's bin has one element left,
// or just the rest of the quota: of a thousand pages with scores of their own usually after three. Keys in memory
// are read once a pass, and twice more when they are emitted: up to 6·4·n bytes by one block. Up to about 40K of them
// stay in the L1 cache after the first pass.
//
// Contention: equal values are structural here. Max-pooling makes plateaus of hundreds of equal keys, and the top digit
// is the exponent, so a warp often adds 32 times to one bin, which shared memory serialises. Hence kCopies histograms,
// interleaved: lane l adds to copy l % kCopies of its bin, in another bank than its neighbours'. With 32
// copies (32 KiB) no two lanes of a warp ever collide, for any data and any weights; aggregating within the warp by
// match or leader election costs instructions on every key and helps only where values repeat. Small n: fewer copies,
// because the cost of a pass is then that of clearing and adding up the copies.
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

struct Threshold {
    uint32_t key;
    int32_t ties;   // weight that elements of this key still get, in ascending order of index
    uint32_t mask;  // of the bits of keys that count

    __device__ __forceinline__ bool is_below(uint32_t other) const { return (other & mask) > key; }
    __device__ __forceinline__ bool is_equal(uint32_t other) const { return (other & mask) == key; }
};

struct UnitWeight {
    __device__ __forceinline__ int32_t operator()(int32_t) const { return 1; }
};

// Keys in memory: the threads take neighbouring keys and load kInFlight of them before they use the first, because the
// keys of a long prompt come from L2.
template <int kThreads, class KeyAt>
struct MemoryKeys {
    int32_t n;
    KeyAt key_at;

    // Calls visit(i, key) for this thread's candidates.
    template <class Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
        constexpr int32_t kInFlight = 8;
#pragma unroll 1
        for (int32_t base = threadIdx.x; base < n; base += kThreads * kInFlight) {
            uint32_t keys[kInFlight];
#pragma unroll
            for (int32_t j = 0; j < kInFlight; ++j) {
                const int32_t i = base + j * kThreads;
                keys[j] = i < n ? key_at(i) : 0;
            }
#pragma unroll
            for (int32_t j = 0; j < kInFlight; ++j) {
                const int32_t i = base + j * kThreads;
                if (i < n) visit(i, keys[j]);
            }
        }
    }
};

template <int kThreads, class KeyAt>
__device__ __forceinline__ MemoryKeys<kThreads, KeyAt> memory_keys(int32_t n, KeyAt key_at) {
    return {n, key_at};
}

// Keys in registers: thread t holds the keys of candidates t · kKeys to (t + 1) · kKeys - 1, where they exist.
template <int kKeys>
struct RegisterKeys {
    static_assert(kKeys <= 32, "a bit for each");
    uint32_t keys[kKeys];
    int32_t first;  // candidate
    int32_t count;  // at most 0: none

    template <class Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
#pragma unroll
        for (int32_t j = 0; j < kKeys; ++j) {
            if (j < count) visit(first + j, keys[j]);
        }
    }
};

// Clears the histogram for the next selection, which may start after a barrier.
template <int kThreads, int kCopies>
__device__ __forceinline__ void clear_histogram(SharedSpan<uint32_t> histogram) {
#pragma unroll
    for (int32_t i = 0; i < kHistogramWords<kCopies> / kThreads; ++i) histogram[threadIdx.x + i * kThreads] = 0;
}

// Adds the weight of every key that agrees with `prefix` under `mask` to the bin of its digit at `shift`.
template <int kCopies, class Keys, class WeightAt>
__device__ __forceinline__ void count_digits(const Keys& keys, uint32_t prefix, uint32_t mask, int32_t shift,
                                             WeightAt weight_at, SharedSpan<uint32_t> histogram) {
    const int32_t copy = static_cast<int32_t>(threadIdx.x) % kCopies;
    keys.for_each([&](int32_t i, uint32_t key) {
        if (((key ^ prefix) & mask) == 0) {
            const uint32_t digit = (key >> shift) % kRadixBins;
            atomicAdd(&histogram[digit * kCopies + copy], static_cast<uint32_t>(weight_at(i)));
        }
    });
}

// sums[i] = weight in bin 255 - i; clears the histogram for the next pass.
template <int kThreads, int kCopies>
__device__ __forceinline__ void add_copies(SharedSpan<uint32_t> histogram, SharedSpan<uint32_t> sums) {
    static_assert(kHistogramWords<kCopies> % kThreads == 0, "whole warps add up, in every round");
#pragma unroll
    for (int32_t i = 0; i < kHistogramWords<kCopies> / kThreads; ++i) {
        const int32_t word = static_cast<int32_t>(threadIdx.x) + i * kThreads;
        uint32_t weight = histogram[word];
        histogram[word] = 0;
        for (int32_t step = 1; step < kCopies; step *= 2) weight += __shfl_xor_sync(kFullWarp, weight, step);
        if (word % kCopies == 0) sums[kRadixBins - 1 - word / kCopies] = weight;
    }
}

// The highest digit at which the weight from the top reaches `quota`; `quota` becomes the rest for that digit;
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
    int32_t passed = 0, above = before;  // sums ascend, so no comparison waits for the one before
#pragma unroll
    for (int32_t j = 0; j + 1 < kBinsPerLane; ++j) {
        above += weights[j];
        if (above < quota) {
            before = above;
            ++passed;
        }
    }
    const int32_t owner = __ffs(static_cast<int32_t>(__ballot_sync(kFullWarp, here))) - 1;
    quota -= __shfl_sync(kFullWarp, before, owner);
    return static_cast<uint32_t>(kRadixBins - 1 - __shfl_sync(kFullWarp, lane * kBinsPerLane + passed, owner));
}

// The caller has cleared the histogram and stored the keys, followed by a barrier. Two barriers in each pass. A quota
// <= 0 selects nothing, a quota beyond the total weight everything. `single`: elements that together weigh at most this
// are one element; 0 where there is no such bound. kAllPasses suits frequent equal keys: it saves a test in every pass.
//
// `add_up` does the work of add_copies over all blocks that have a part of the keys; all blocks get the same sums.
constexpr int32_t kAllPasses = -1;
template <int kThreads, int kCopies, class Keys, class WeightAt, class AddUp>
__device__ __forceinline__ Threshold find_threshold_by(const Keys& keys, int32_t quota, int32_t single,
                                                       WeightAt weight_at, SharedSpan<uint32_t> histogram,
                                                       SharedSpan<uint32_t> sums, AddUp add_up) {
    static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024, "whole warps, at most one block");
    static_assert(kCopies >= 1 && kCopies <= kWarpSize && (kCopies & (kCopies - 1)) == 0, "copies divide a warp");
    if (quota <= 0) return {0xffffffffu, 0, 0xffffffffu};
    uint32_t prefix = 0;
    uint32_t mask = 0;
#pragma unroll 1
    for (int32_t shift = 32 - kRadixBits; shift >= 0; shift -= kRadixBits) {
        count_digits<kCopies>(keys, prefix, mask, shift, weight_at, histogram);
        __syncthreads();
        add_up();
        __syncthreads();
        const uint32_t digit = take_digit(sums, quota);
        prefix |= digit << shift;
        mask |= static_cast<uint32_t>(kRadixBins - 1) << shift;
        const auto weight = static_cast<int32_t>(sums[kRadixBins - 1 - digit]);  // read by all before the next barrier
        if (single != kAllPasses && (weight <= single || weight <= quota)) break;
    }
    return {prefix, quota, single != kAllPasses ? mask : 0xffffffffu};
}

// Finds the threshold in one block that has all keys.
template <int kThreads, int kCopies, class Keys, class WeightAt>
__device__ __forceinline__ Threshold find_threshold(const Keys& keys, int32_t quota, int32_t single, WeightAt weight_at,
                                                    SharedSpan<uint32_t> histogram, SharedSpan<uint32_t> sums) {
    return find_threshold_by<kThreads, kCopies>(keys, quota, single, weight_at, histogram, sums,
                                                [&] { add_copies<kThreads, kCopies>(histogram, sums); });
}

}  // namespace kvc
