// Clusters (sm_90 and later): blocks that are on the machine together, meet at a barrier, and reach into each other's
// shared memory.
//
//     announce_to_cluster();             // this thread is there; orders only what it did before a __threadfence
//     arrive_at_cluster();               // or: and its writes, into any of the blocks, come before the barrier
//     wait_for_cluster();                // every thread of the cluster has arrived; its writes are here
//     span.of_block(rank)[i] = value;    // element i of that block's span of the same declaration
//
// A thread must have passed one such barrier before it touches another block's memory: that block may not have begun.
// A block may end only after the last access to its memory: behind a barrier that the other blocks arrive at later.
// Kernels here write into other blocks and read their own alone: a write is under way while the thread goes on, a read is
// waited for, and the barrier that makes the writes visible is also the last that a block needs before it ends. Of
// asynchronous writes (cluster_inbox.cuh) the block that they are for waits for the bytes, without a barrier.
#pragma once

#include "kernels/platform.cuh"

namespace kvc {

constexpr int kClusterBlocks = 8;  // the most that every GPU allows

// For a number of blocks that is a power of two, on host and device: a shift takes far less time than a division.
__host__ __device__ __forceinline__ constexpr int log2_of_blocks(int blocks) {
    static_assert(kClusterBlocks == 8);
    return (blocks > 1) + (blocks > 2) + (blocks > 4);
}

// The block's rank, where one cluster spans the whole grid along x.
__device__ __forceinline__ int cluster_rank() { return static_cast<int>(blockIdx.x); }

__device__ __forceinline__ void announce_to_cluster() { platform::announce_at_cluster_barrier(); }
__device__ __forceinline__ void arrive_at_cluster() { platform::arrive_at_cluster_barrier(); }
__device__ __forceinline__ void wait_for_cluster() { platform::wait_at_cluster_barrier(); }

__device__ __forceinline__ void synchronize_cluster() {
    arrive_at_cluster();
    wait_for_cluster();
}

}  // namespace kvc
