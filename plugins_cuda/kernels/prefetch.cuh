// Reads memory into the L2 cache while other kernels run, for the kernels that follow them.
//
// A step's attention waits for latencies and leaves the memory idle, where the weights of the next products lie. A
// thread asks for kPiece bytes by one instruction and ends: nothing waits for the bytes, and no registers, shared
// memory or L1 lines hold them. Deterministic: nothing is written.
#pragma once

#include <cstdint>

#include "kernels/dependent_launch.cuh"
#include "kernels/platform.cuh"

namespace kvc {

constexpr int kPrefetchThreads = 32;

struct PrefetchParams {
    const char* first;  // 16-byte aligned
    int64_t bytes;      // a multiple of 16
};

// Grid (ceil(bytes / (kPrefetchThreads kPiece))).
template <int kPiece>
__global__ void __launch_bounds__(kPrefetchThreads) prefetch(const PrefetchParams params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t begin = (int64_t{blockIdx.x} * kPrefetchThreads + threadIdx.x) * kPiece;
    const int64_t left = params.bytes - begin;
    if (left > 0) {
        platform::prefetch_to_l2(params.first + begin, static_cast<uint32_t>(left < kPiece ? left : kPiece));
    }
}

}  // namespace kvc
