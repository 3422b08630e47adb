// Copies stored and new tokens of a turn into one table, for the turn's attention and its compaction.
//
// Row b of the table: the first cache_lengths[b] slots of the cache, then the row's new tokens, then zeros. The rest of
// the cache is not copied: a masked entry that is infinite or NaN would reach a product as NaN.
//
// Bytes per row and KV head, s bytes per element, m stored and n new tokens: reads 2·s·D·(m + n), writes 2·s·D·(C + M),
// in vectors of 16 bytes.
//
// Determinism: every element has one writer.
#pragma once

#include <cstdint>

#include "kernels/block_rows.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"

namespace kvc {

constexpr int kJoinThreads = 256;
constexpr int kJoinedPerBlock = 32;

template <class T>
struct JoinBlockParams {
    const T* k_new;    // [B,G,M,D]
    const T* v_new;    // [B,G,M,D]
    const T* k_cache;  // [B,G,C,D]
    const T* v_cache;  // [B,G,C,D]
    const int64_t* cache_lengths;
    const int64_t* lengths;
    T* k;                     // [B,G,C+M,D]
    T* v;                     // [B,G,C+M,D]
    int64_t* joined_lengths;  // [B]
    int64_t capacity;         // C
    int64_t block;            // M
    int32_t kv_heads;         // G
    int32_t head_size;        // D
};

// Grid (ceil((C + M) / kJoinedPerBlock), G, B).
template <class T>
__global__ void __launch_bounds__(kJoinThreads) join_block(const JoinBlockParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const BlockRow row = block_row(params.cache_lengths, params.lengths, blockIdx.z, params.capacity, params.block);
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y;
    const int64_t first = int64_t{blockIdx.x} * kJoinedPerBlock;
    const int64_t entries = min(int64_t{kJoinedPerBlock}, params.capacity + params.block - first);
    const int32_t vectors = params.head_size / kVectorWidth<T>;
    const int64_t table = head * (params.capacity + params.block);
    for (int64_t item = threadIdx.x; item < entries * vectors; item += kJoinThreads) {
        const int64_t entry = first + item / vectors;
        const int32_t channel = static_cast<int32_t>(item % vectors) * kVectorWidth<T>;
        const int64_t to = (table + entry) * params.head_size + channel;
        if (entry < row.stored) {
            const int64_t from = (head * params.capacity + entry) * params.head_size + channel;
            copy_vector(params.k + to, params.k_cache + from);
            copy_vector(params.v + to, params.v_cache + from);
        } else if (entry < row.stored + row.count) {
            const int64_t from = (head * params.block + entry - row.stored) * params.head_size + channel;
            copy_vector(params.k + to, params.k_new + from);
            copy_vector(params.v + to, params.v_new + from);
        } else {
            platform::store_16_bytes(params.k + to, uint4{0, 0, 0, 0});
            platform::store_16_bytes(params.v + to, uint4{0, 0, 0, 0});
        }
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        params.joined_lengths[blockIdx.z] = row.stored + row.count;
    }
}

}  // namespace kvc
