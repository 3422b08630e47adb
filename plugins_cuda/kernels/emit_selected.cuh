// Names the elements that radix_select.cuh selected, in ascending order of index.
//
//   emit_ascending   calls emit(index, slot, count) once for every selected element: its output starts at `slot`. Equal
//                    keys are served in ascending order of index until `ties` is used up, the last one with a part.
//
// A warp's candidates are neighbours. The warp adds up the selected ones, learns the sums of earlier warps (the one
// barrier), and counts on from there.
//
// Code: few bits follow from a key, so the loops that emit are not unrolled. Inlined for every key in
// flight, they would be most of a kernel's instructions.
//
// Determinism: integer sums in a fixed order.
#pragma once

#include <cstdint>

#include "kernels/platform.cuh"
#include "kernels/radix_select.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

namespace kvc {

// Words of shared memory of emit_ascending, none of them in use by anyone when it is called.
template <int kThreads>
constexpr int kEmissionWords = 2 * (kThreads / kWarpSize);

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
__device__ __forceinline__ Share share_of(uint32_t key, const Threshold& threshold, int32_t i, WeightAt weight_at) {
    Share share;
    if (threshold.is_below(key)) share.larger = weight_at(i);
    if (threshold.is_equal(key)) share.equal = weight_at(i);
    return share;
}

// The totals of the warps before this one; each warp passes its own as `of_warp`. One barrier.
template <int kThreads>
__device__ __forceinline__ Share share_before_warp(Share of_warp, SharedSpan<int32_t> storage) {
    constexpr int32_t kWarps = kThreads / kWarpSize;
    const int32_t lane = lane_index();
    const int32_t warp = warp_index();
    if (lane == 0) {
        storage[warp] = of_warp.larger;
        storage[kWarps + warp] = of_warp.equal;
    }
    __syncthreads();
    static_assert(kWarps <= kWarpSize && (kWarps & (kWarps - 1)) == 0, "lanes repeat the warps' totals evenly");
    const int32_t other = lane % kWarps;
    Share before;
    before.larger = other < warp ? storage[other] : 0;
    before.equal = other < warp ? storage[kWarps + other] : 0;
#pragma unroll
    for (int32_t step = kWarps / 2; step > 0; step /= 2) {
        before.larger += __shfl_xor_sync(kFullWarp, before.larger, step);
        before.equal += __shfl_xor_sync(kFullWarp, before.equal, step);
    }
    return before;
}

// The selected among up to 32 candidates, one bit each, the first one's the highest: it takes one instruction less to find.
struct SelectedBits {
    uint32_t larger = 0;
    uint32_t equal = 0;

    __device__ __forceinline__ void add(int32_t candidate, uint32_t key, const Threshold& threshold) {
        larger |= threshold.is_below(key) ? kFirst >> candidate : 0;
        equal |= threshold.is_equal(key) ? kFirst >> candidate : 0;
    }

    __device__ __forceinline__ uint32_t all() const { return larger | equal; }
    __device__ __forceinline__ static int32_t first_of(uint32_t bits) { return __clz(static_cast<int32_t>(bits)); }
    __device__ __forceinline__ static uint32_t without(uint32_t bits, int32_t candidate) {
        return bits & ~(kFirst >> candidate);
    }

    template <class WeightAt>
    __device__ __forceinline__ Share share(int32_t candidate, int32_t i, WeightAt weight_at) const {
        Share share;
        if ((larger & kFirst >> candidate) != 0) share.larger = weight_at(i);
        if ((equal & kFirst >> candidate) != 0) share.equal = weight_at(i);
        return share;
    }

private:
    static constexpr uint32_t kFirst = 0x80000000u;
};

// Emits one candidate, if it gets a slot; `before` is the total of the candidates before it.
template <class Emit>
__device__ __forceinline__ void emit_one(int32_t i, Share own, int32_t ties, Share before, Emit emit) {
    const int32_t slot = before.slots(ties);
    const int32_t count = (before + own).slots(ties) - slot;
    if (count > 0) emit(i, slot, count);
}

// Keys in memory. Every warp walks a contiguous part of the candidates twice. Ends without a barrier.
template <int kThreads, class KeyAt, class WeightAt, class Emit>
__device__ __forceinline__ void emit_ascending(const MemoryKeys<kThreads, KeyAt>& keys, Threshold threshold,
                                               WeightAt weight_at, SharedSpan<int32_t> storage, Emit emit) {
    constexpr int32_t kInFlight = 8;
    constexpr int32_t kWarps = kThreads / kWarpSize;
    const int32_t n = keys.n;
    const int32_t part = (n + kWarps * kWarpSize - 1) / (kWarps * kWarpSize) * kWarpSize;
    const int32_t first = warp_index() * part;
    const int32_t last = first + part < n ? first + part : n;

    Share own;
#pragma unroll kInFlight
    for (int32_t i = first + lane_index(); i < last; i += kWarpSize) {
        own = own + share_of(keys.key_at(i), threshold, i, weight_at);
    }
    Share before = share_before_warp<kThreads>({warp_sum(own.larger), warp_sum(own.equal)}, storage);
#pragma unroll 1
    for (int32_t base = first; base < last; base += kWarpSize * kInFlight) {
        SelectedBits bits;
#pragma unroll
        for (int32_t j = 0; j < kInFlight; ++j) {
            const int32_t i = base + j * kWarpSize + lane_index();
            if (i < last) bits.add(j, keys.key_at(i), threshold);
        }
#pragma unroll 1
        for (int32_t j = 0; j < kInFlight; ++j) {
            const int32_t i = base + j * kWarpSize + lane_index();
            const Share share = bits.share(j, i, weight_at);
            if (!__any_sync(kFullWarp, share.larger + share.equal > 0)) continue;
            Share all;
            const Share below = {warp_exclusive_scan(share.larger, all.larger),
                                 warp_exclusive_scan(share.equal, all.equal)};
            emit_one(i, share, threshold.ties, before + below, emit);
            before = before + all;
        }
    }
}

// Keys of which each thread has neighbours, at most 32: one scan. Ends without a barrier.
template <int kThreads, class Keys, class WeightAt, class Emit>
__device__ __forceinline__ void emit_ascending(const Keys& keys, Threshold threshold, WeightAt weight_at,
                                               SharedSpan<int32_t> storage, Emit emit) {
    SelectedBits bits;
    Share own;
    keys.for_each([&](int32_t i, uint32_t key) {
        bits.add(i - keys.first, key, threshold);
        own = own + share_of(key, threshold, i, weight_at);
    });
    Share all;
    const Share below = {warp_exclusive_scan(own.larger, all.larger), warp_exclusive_scan(own.equal, all.equal)};
    Share before = share_before_warp<kThreads>(all, storage) + below;
#pragma unroll 1
    for (uint32_t left = bits.all(); left != 0;) {
        const int32_t candidate = SelectedBits::first_of(left), i = keys.first + candidate;
        const Share share = bits.share(candidate, i, weight_at);
        emit_one(i, share, threshold.ties, before, emit);
        before = before + share;
        left = SelectedBits::without(left, candidate);
    }
}

}  // namespace kvc
