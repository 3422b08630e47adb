// Appends one token to the cache of a KV head: its key and value, and what becomes of a page's bounds.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3: pages of p consecutive slots keep the element-wise extremes of
// their keys. Bounds are stored channel-major, [2D,P] per KV head: row d holds the page maxima of K, row D+d those of
// -K, so that a minimum is read as a negated maximum and one comparison serves both.
//
// Bytes per KV head: 4 D s for the key and the value (s bytes per element; read and written once), and 2 D sectors of
// 32 bytes read and written for the bounds, because the page's elements of different channels are P elements apart.
// Deterministic: every element has one writer.
#pragma once

#include <cstdint>

#include "kernels/attended_row.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"

namespace kvc {

// Enough for the key and the value of the largest head (256 fp32 elements, 4 per thread).
constexpr int kAppendThreads = 128;

// The 16 bytes of a token's key or value [D] that one thread copies; by threads 0..kAppendThreads-1.
template <class T>
class TokenVector {
public:
    // Starts to read them.
    __device__ __forceinline__ TokenVector(const T* __restrict__ k_new, const T* __restrict__ v_new, int head_size)
        : is_key_(static_cast<int>(threadIdx.x) < kHalf),
          first_(static_cast<int>(threadIdx.x) % kHalf * kVectorWidth<T>),
          exists_(static_cast<int>(threadIdx.x) < kAppendThreads && first_ < head_size) {
        if (exists_) {
            bits_ = platform::load_16_bytes((is_key_ ? k_new : v_new) + first_);
        }
    }

    // Writes them into `slot` of the caches [C,D] of the KV head.
    __device__ __forceinline__ void write(T* __restrict__ k_cache, T* __restrict__ v_cache, int64_t slot,
                                          int head_size) const {
        if (exists_) {
            platform::store_16_bytes((is_key_ ? k_cache : v_cache) + slot * head_size + first_, bits_);
        }
    }

private:
    static constexpr int kHalf = kAppendThreads / 2;
    bool is_key_;
    int first_;  // element
    bool exists_;
    uint4 bits_{};
};

// The bounds of one channel of a page. An empty page holds the lowest finite values.
struct ChannelBounds {
    float maximum;
    float negated_minimum;

    // A token joins the page. NaN in its key makes both NaN, as in the reference.
    __device__ __forceinline__ void raise(float key) {
        maximum = nan_max(maximum, key);
        negated_minimum = nan_max(negated_minimum, -key);
    }
};

// This thread's channel of the page that a token joins; channel d has thread d.
template <class T>
class JoinedChannel {
public:
    // Starts to read the bounds [2D,P] of the page, and the key [D].
    __device__ __forceinline__ JoinedChannel(const T* __restrict__ k_new, T* __restrict__ bounds, int head_size,
                                             int pages, int page)
        : exists_(static_cast<int>(threadIdx.x) < head_size),
          maximum_(bounds + static_cast<int>(threadIdx.x) * pages + page),
          negated_minimum_(maximum_ + head_size * pages) {
        if (exists_) {
            key_ = k_new[threadIdx.x];
            maximum_before_ = *maximum_;
            negated_minimum_before_ = *negated_minimum_;
        }
    }

    // Writes the bounds with the token in the page.
    __device__ __forceinline__ void raise() const {
        if (exists_) {
            ChannelBounds bounds = {to_float(maximum_before_), to_float(negated_minimum_before_)};
            bounds.raise(to_float(key_));
            *maximum_ = from_float<T>(bounds.maximum);
            *negated_minimum_ = from_float<T>(bounds.negated_minimum);
        }
    }

private:
    bool exists_;
    T* maximum_;
    T* negated_minimum_;
    T key_{};
    T maximum_before_{};
    T negated_minimum_before_{};
};

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
    const TokenVector<T> token(params.k_new + entry, params.v_new + entry, params.head_size);
    token.write(params.k_cache + cache, params.v_cache + cache, slot, params.head_size);
}

}  // namespace kvc
