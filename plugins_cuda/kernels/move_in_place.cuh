// Moves the kept rows of K and V to the front of the caches that hold them: compaction without a second cache.
//
// Source: RocketKV, arXiv 2502.14051, end of algorithm 1. Bounds and the zeros after the kept rows are the work
// of gather_cache.cuh, which runs next.
//
// Blocks own slices of channels of K or of V, which do not depend on each other. Each walks the slots in ascending
// chunks, reads a chunk whole, and writes it after a barrier. That is safe because positions ascend, so position >=
// slot: no later chunk reads a slot that an earlier chunk wrote. Rows that keep everything are not touched.
//
// Bytes per row and KV head that evicts, s bytes per element: reads and writes 2·s·D·budget; reads the indices,
// 4·budget, once per slice. Every access to K and V is 16 bytes wide; a slice is 64 bytes of a row, two whole sectors.
//
// Determinism: every element has one writer.
#pragma once

#include <cstdint>

#include "kernels/dependent_launch.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"

namespace kvc {

constexpr int kMoveThreads = 256;
constexpr int kSliceVectors = 4;
// Rows that a thread reads before it writes the first.
constexpr int kMovesInFlight = 4;

template <class T>
struct MoveParams {
    int32_t batch;                 // rows
    int32_t kv_heads;              // G
    int32_t head_size;             // D
    int32_t capacity;              // C
    int32_t slices;                // of the channels of K, and as many of V
    T* k_cache;                    // [B,G,C,D]
    T* v_cache;                    // [B,G,C,D]
    const int32_t* indices;        // [B,G,C]: slot that holds the row of each slot, ascending
    const int64_t* cache_lengths;  // [B]: slots in use afterwards
};

// Grid (slices of K, then of V; G; B).
template <class T>
__global__ void __launch_bounds__(kMoveThreads) move_in_place(const MoveParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    constexpr int32_t kSlots = kMoveThreads / kSliceVectors;
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y;
    const int32_t* indices = params.indices + head * params.capacity;
    const auto length = static_cast<int32_t>(params.cache_lengths[blockIdx.z]);
    // Positions ascend, so if the last row stays where it is, all do.
    if (length == 0 || indices[length - 1] == length - 1) return;

    const auto slice = static_cast<int32_t>(blockIdx.x);
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t vector = slice % params.slices * kSliceVectors + thread % kSliceVectors;
    const int32_t end = vector < params.head_size / kVectorWidth<T> ? length : 0;
    T* cache = slice < params.slices ? params.k_cache : params.v_cache;
    T* channels = cache + head * params.capacity * params.head_size + vector * kVectorWidth<T>;
    for (int32_t chunk = 0; chunk < length; chunk += kSlots * kMovesInFlight) {
        const int32_t first = chunk + thread / kSliceVectors;
        uint4 rows[kMovesInFlight] = {};
#pragma unroll
        for (int j = 0; j < kMovesInFlight; ++j) {
            const int32_t slot = first + j * kSlots;
            if (slot < end) rows[j] = platform::load_16_bytes(channels + int64_t{indices[slot]} * params.head_size);
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < kMovesInFlight; ++j) {
            const int32_t slot = first + j * kSlots;
            if (slot < end) platform::store_16_bytes(channels + int64_t{slot} * params.head_size, rows[j]);
        }
    }
}

}  // namespace kvc
