// Appends one token to the cache of a KV head: its key and value, and what becomes of a page's bounds.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3: pages of p consecutive slots keep the element-wise extremes of
// their keys. Bounds are stored channel-major, [2D,P] per KV head: row d holds the page maxima of K, row D+d those of
// -K, so that a minimum is read as a negated maximum and one comparison serves both.
//
// Bytes per KV head: 4 D s for the key and the value (s bytes per element; read and written once), and 2 D sectors of
// 32 bytes read and written for the bounds, because the page's elements of different channels are P elements apart.
// Deterministic: every element has one writer. page_scores.cuh writes key and value and only reads bounds; its next
// launch, select_tokens.cuh, raises them. In the same launch the blocks that read the page's neighbours, 16 bytes at a
// time, would race with the write.
#pragma once

#include <cstdint>

#include "kernels/attended_row.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"

namespace kvc {

// Enough for the key and the value of the largest head (256 fp32 elements, 4 per thread).
constexpr int kAppendThreads = 128;

// Copies k_new and v_new [D] of one KV head into `slot` of its caches [C,D]; by threads 0..kAppendThreads-1.
template <class T>
__device__ __forceinline__ void append_row(const T* __restrict__ k_new, const T* __restrict__ v_new,
                                           T* __restrict__ k_cache, T* __restrict__ v_cache, int64_t slot,
                                           int head_size) {
    constexpr int kHalf = kAppendThreads / 2;
    const int thread = static_cast<int>(threadIdx.x);
    const int d = (thread % kHalf) * kVectorWidth<T>;
    if (thread >= kAppendThreads || d >= head_size) {
        return;
    }
    const bool is_key = thread < kHalf;
    copy_vector((is_key ? k_cache : v_cache) + slot * head_size + d, (is_key ? k_new : v_new) + d);
}

// Bound `row` of a page (row d: maximum of K, row D+d: of -K) that was `before` until the token of key k_new [D] joined
// it. An empty page holds the lowest finite value. NaN in a key makes its channel's bounds NaN, as in the reference.
template <class T>
__device__ __forceinline__ float raised_bound(float before, const T* __restrict__ k_new, int row, int head_size) {
    return nan_max(before, row < head_size ? to_float(k_new[row]) : -to_float(k_new[row - head_size]));
}

template <class T>
struct AppendParams {
    const T* k_new;                // [B,G,D]
    const T* v_new;                // [B,G,D]
    T* k_cache;                    // [B,G,C,D]
    T* v_cache;                    // [B,G,C,D]
    const int64_t* cache_lengths;  // [B]: slot of the new token; outside 0..C-1 the row is left alone
    int32_t* arrivals;             // [B,G]: set to zero for the merge of the attention that follows
    int64_t capacity;              // C
    int32_t kv_heads;              // G
    int32_t head_size;             // D
};

// The append of the dense path, which keeps no bounds. Grid (G, B).
template <class T>
__global__ void __launch_bounds__(kAppendThreads) append(const AppendParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t head = int64_t{blockIdx.y} * params.kv_heads + blockIdx.x;
    if (threadIdx.x == 0) {
        params.arrivals[head] = 0;
    }
    const int64_t slot = params.cache_lengths[blockIdx.y];
    if (!has_slot(slot, params.capacity)) {
        return;
    }
    const int64_t entry = head * params.head_size, cache = entry * params.capacity;
    append_row(params.k_new + entry, params.v_new + entry, params.k_cache + cache, params.v_cache + cache, slot,
               params.head_size);
}

}  // namespace kvc
