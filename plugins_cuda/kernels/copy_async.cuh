// Copies from global to shared memory that run while the thread goes on (cp.async, sm_80 and later).
//
//     copy_async_16(&tile[i], row + i);  // any number of them, 16 bytes each, both sides 16-byte aligned
//     copy_async_commit();               // closes a group
//     copy_async_wait<1>();              // all groups of this thread but the last one have arrived
//     __syncthreads();                   // ... and those of the other threads
//
// A wait makes the thread's own copies visible to itself alone; a barrier is needed before others read them, and
// before the next copy overwrites data that others still read.
#pragma once

#include "kernels/platform.cuh"

namespace kvc {

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
    platform::copy_async_16(shared, global);
}

// One aligned vector of 4, 8 or 16 bytes.
template <class Vector>
__device__ __forceinline__ void copy_async(Vector* shared, const void* global) {
    if constexpr (sizeof(Vector) == 16) {
        platform::copy_async_16(shared, global);
    } else {
        platform::copy_async_few<sizeof(Vector)>(shared, global);
    }
}

__device__ __forceinline__ void copy_async_commit() { platform::copy_async_commit(); }

// Returns when at most kPending of the groups that this thread has committed are still under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
    platform::copy_async_wait<kPending>();
}

}  // namespace kvc
