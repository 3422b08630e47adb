// Sums, maxima and scans over a warp or a block of kThreads threads (a multiple of 32, one-dimensional).
//
// Deterministic: every result is a fixed tree over the lanes, then the warps in ascending order, whatever the order in
// which threads run. Every thread gets the same bits. The block-wide ones must be reached by all threads; each takes
// two __syncthreads, the first so that scratch memory of an earlier call (or anything else the caller wrote to shared
// memory) has been read or become visible. After the second, threads may still be reading the scratch: it is private.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/shared.cuh"

namespace kvc {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / kWarpSize; }

// Butterfly: a + b and b + a have the same bits, so all lanes agree. No barrier beyond the shuffles themselves.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
    return value;
}

// NaN wins.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
        value = nan_max(value, __shfl_xor_sync(kFullWarp, value, step));
    }
    return value;
}

template <int kThreads, class T>
__device__ __forceinline__ T block_sum(T value) {
    static_assert(kThreads % kWarpSize == 0);
    KVC_SHARED(T, warp_sums, kThreads / kWarpSize);
    const T mine = warp_sum(value);
    __syncthreads();
    if (lane_index() == 0) warp_sums[warp_index()] = mine;
    __syncthreads();
    T total = warp_sums[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / kWarpSize; ++warp) total += warp_sums[warp];
    return total;
}

// NaN wins.
template <int kThreads>
__device__ __forceinline__ float block_max(float value) {
    static_assert(kThreads % kWarpSize == 0);
    KVC_SHARED(float, warp_maxima, kThreads / kWarpSize);
    const float mine = warp_max(value);
    __syncthreads();
    if (lane_index() == 0) warp_maxima[warp_index()] = mine;
    __syncthreads();
    float largest = warp_maxima[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / kWarpSize; ++warp) largest = nan_max(largest, warp_maxima[warp]);
    return largest;
}

// Sum of the values of the lanes below this one, and of all lanes.
template <class T>
__device__ __forceinline__ T warp_exclusive_scan(T value, T& total) {
    T inclusive = value;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
        const T below = __shfl_up_sync(kFullWarp, inclusive, step);
        if (lane_index() >= step) inclusive += below;
    }
    total = __shfl_sync(kFullWarp, inclusive, kWarpSize - 1);
    return inclusive - value;
}

// Sum of the values of the threads below this one, and of all threads. Integers: exact, whatever the tree.
template <int kThreads, class T>
__device__ __forceinline__ T block_exclusive_scan(T value, T& total) {
    static_assert(kThreads % kWarpSize == 0);
    KVC_SHARED(T, warp_totals, kThreads / kWarpSize);
    T warp_total;
    T before = warp_exclusive_scan(value, warp_total);
    __syncthreads();
    if (lane_index() == 0) warp_totals[warp_index()] = warp_total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int warp = 0; warp < kThreads / kWarpSize; ++warp) {
        if (warp == warp_index()) before += total;
        total += warp_totals[warp];
    }
    return before;
}

}  // namespace kvc
