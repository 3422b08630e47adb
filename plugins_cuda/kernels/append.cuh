// Appends one token to the cache of a KV head: its key and value, and for pages the bounds of its keys.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3: pages of p consecutive slots keep the element-wise extremes of
// their keys. Bounds are stored channel-major, [2D,P] per KV head: row d holds the page maxima of K, row D+d those of
// -K, so that a minimum is read as a negated maximum and one comparison serves both.
//
// Bytes per KV head: 4 D s for the key and the value (s bytes per element; read and written once), and 2 D sectors of
// 32 bytes read and written for the bounds, because the page's elements of different channels lie P elements apart.
// Deterministic: every element has one writer. Raising a bound twice by the same key changes nothing.
#pragma once

#include <cstdint>

#include "kernels/attended_row.cuh"
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

// What one channel of a page is bounded by: the maximum of K, and that of -K.
struct ChannelBounds {
    float maximum;
    float negated_minimum;
};

// The page of one slot in the bounds [2D,P] of a KV head.
template <class T>
struct BoundedPage {
    T* bounds;       // [2D,P]
    int32_t pages;   // P
    int32_t page;    // 0..P-1
    bool is_first;   // the slot is the page's first: nothing was stored before it
    int32_t head_size;

    // Bounds of channel d before the append. The first key of a page meets the value of an empty page.
    __device__ __forceinline__ ChannelBounds before(int d) const {
        if (is_first) {
            return {lowest_finite<T>(), lowest_finite<T>()};
        }
        return {to_float(*element(d)), to_float(*element(head_size + d))};
    }

    __device__ __forceinline__ void store(int d, ChannelBounds raised) const {
        *element(d) = from_float<T>(raised.maximum);
        *element(head_size + d) = from_float<T>(raised.negated_minimum);
    }

    __device__ __forceinline__ T* element(int row) const { return bounds + int64_t{row} * pages + page; }
};

// NaN in a key makes its channel's bounds NaN, as in the reference.
__device__ __forceinline__ ChannelBounds raise_bounds(ChannelBounds before, float key) {
    return {nan_max(before.maximum, key), nan_max(before.negated_minimum, -key)};
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
