// Sums, maxima and scans over a warp, by all of its lanes.
//
// Deterministic: every result is a fixed tree over the lanes, in any order of the threads, and every lane of a sum or a
// maximum gets the same bits. Shuffles order no memory: an exchange between lanes through shared memory needs a
// barrier of its own.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/warp.cuh"

namespace kvc {

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

}  // namespace kvc
