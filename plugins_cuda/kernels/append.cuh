// Appends one token to the cache of a KV head: its key and value, and the change to its page's bounds. The step rotates
// the key on the way where it has to (new_token.cuh); then it also rotates the query, for the attention kernel.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3: pages of p consecutive slots keep the element-wise extremes of
// their keys. Bounds are stored channel-major, [2D,P] per KV head: row d holds the page maxima of K, row D+d those of
// -K, so that a minimum is read as a negated maximum and one comparison serves both. In fp8 (fp8.cuh) they are rounded up;
// a maximum of rounded numbers is the rounded maximum.
//
// In a format (stored_vector.cuh) a warp stores the key and another one the value, and bounds are those of the
// dequantised key.
//
// Bytes per KV head: 4 D s for the key and the value (s bytes per element; read and written once), and 2 D sectors of
// 32 bytes read and written for the bounds, of any type, because the page's elements of different channels are P
// elements apart. Where it is rotated here, 2 g D s for the query (g heads of the group), read and written, and 4 D for
// the row's angles.
// Deterministic: every element has one writer.
#pragma once

#include <cstdint>

#include "kernels/attended_row.cuh"
#include "kernels/bound_table.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/new_token.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"
#include "kernels/shared.cuh"
#include "kernels/stored_vector.cuh"
#include "kvc/limits.h"

namespace kvc {

constexpr int kAppendThreads = KVC_LARGEST_HEAD_SIZE;

// This thread's channel of a token's key and value.
template <class T>
class TokenChannel {
public:
    // Starts to read key and value [D].
    __device__ __forceinline__ TokenChannel(const HeadChannel<T>& channel, const T* __restrict__ key,
                                            const T* __restrict__ value)
        : channel_(channel) {
        if (channel_.exists()) {
            key_ = channel_.load(key);
            value_ = value[channel_.number()];
        }
    }

    // The key, rotated.
    __device__ __forceinline__ T key() const { return channel_.rotated(key_); }

    // Writes both to their places in float [D].
    __device__ __forceinline__ void widen_to(const SharedSpan<float>& key_to, const SharedSpan<float>& value_to) const {
        if (channel_.exists()) {
            key_to[channel_.number()] = to_float(key());
            value_to[channel_.number()] = to_float(value_);
        }
    }

    // Writes both into `slot` of the caches [C,D] of the KV head.
    __device__ __forceinline__ void write(T* __restrict__ k_cache, T* __restrict__ v_cache, int64_t slot,
                                          int head_size) const {
        if (channel_.exists()) {
            const int64_t to = slot * head_size + channel_.number();
            k_cache[to] = key();
            v_cache[to] = value_;
        }
    }

private:
    const HeadChannel<T>& channel_;
    typename HeadChannel<T>::Pair key_{};
    T value_{};
};

// The bounds of one channel of a page. An empty page holds the lowest finite values.
struct ChannelBounds {
    float maximum;
    float negated_minimum;

    // Adds a token to the page. NaN in its key makes both bounds NaN, as in the reference.
    __device__ __forceinline__ void raise(float key) {
        maximum = nan_max(maximum, key);
        negated_minimum = nan_max(negated_minimum, -key);
    }
};

// This thread's channel of the page that a token joins; channel d has thread d.
template <class T>
class JoinedChannel {
public:
    // Starts to read the bounds [2D,P] of the page.
    __device__ __forceinline__ JoinedChannel(const BoundTable<T>& bounds, int head_size, int pages, int page)
        : exists_(static_cast<int>(threadIdx.x) < head_size),
          maximum_(bounds.from(static_cast<int>(threadIdx.x) * pages + page)),
          negated_minimum_(maximum_.from(head_size * pages)) {
        if (exists_) {
            maximum_before_ = maximum_.load(0);
            negated_minimum_before_ = negated_minimum_.load(0);
        }
    }

    // True if the thread has a channel of the page.
    __device__ __forceinline__ bool exists() const { return exists_; }

    // Writes the bounds of the page with a token of this key, as it is read back, in it, and returns them unrounded.
    __device__ __forceinline__ ChannelBounds raise(float key) const {
        ChannelBounds bounds = {maximum_.widen(maximum_before_), negated_minimum_.widen(negated_minimum_before_)};
        bounds.raise(key);
        if (exists_) {
            maximum_.store(0, bounds.maximum);
            negated_minimum_.store(0, bounds.negated_minimum);
        }
        return bounds;
    }

private:
    bool exists_;
    BoundTable<T> maximum_;
    BoundTable<T> negated_minimum_;
    typename BoundTable<T>::Stored maximum_before_{};
    typename BoundTable<T>::Stored negated_minimum_before_{};
};

// Stores one of a token's vectors, float [D] in shared memory, by a warp, and replaces it by the dequantised one.
__device__ __forceinline__ void store_shared_vector(const SharedSpan<float>& vector, int head_size,
                                                    const VectorTable& to) {
    const int first = lane_index() * kLaneChannels;
    float channels[kLaneChannels] = {};
    if (first < head_size) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            channels[i] = vector[first + i];
        }
    }
    store_vector(channels, head_size, to);
    if (first < head_size) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            vector[first + i] = channels[i];
        }
    }
}

// Stores a token in `slot` of the caches of a KV head, by all threads of a block; returns this thread's channel of the
// key, as it is read back. In a format it has two barriers.
template <bool kInFormat, class T>
__device__ __forceinline__ float store_token(const TokenChannel<T>& entry, const VectorTable& keys,
                                             const VectorTable& values, int64_t slot, int head_size) {
    if constexpr (kInFormat) {
        KVC_SHARED(float, token, 2 * KVC_LARGEST_HEAD_SIZE);
        const auto of_warp = [&](int warp) {  // chosen by its offset: a choice between two spans takes local memory
            return token.part(warp * KVC_LARGEST_HEAD_SIZE, KVC_LARGEST_HEAD_SIZE);
        };
        const SharedSpan<float> key = of_warp(0);
        entry.widen_to(key, of_warp(1));
        __syncthreads();
        if (const int warp = warp_index(); warp < 2) {
            store_shared_vector(of_warp(warp), head_size, (warp == 0 ? keys : values).from(slot));
        }
        __syncthreads();
        return static_cast<int>(threadIdx.x) < head_size ? key[threadIdx.x] : 0.0f;
    } else {
        entry.write(static_cast<T*>(keys.codes), static_cast<T*>(values.codes), slot, head_size);
        return to_float(entry.key());
    }
}

template <class T>
struct AppendParams {
    NewToken<T> token;
    VectorTable keys;              // [B,G,C,.]
    VectorTable values;            // [B,G,C,.]
    const int64_t* cache_lengths;  // [B]: slot of the new token; outside 0..C-1 the row is left alone
    int32_t* arrivals;             // [B,G]: set to zero for the merge of the attention that follows
    int64_t capacity;              // C
    int32_t kv_heads;              // G
    int32_t group;                 // H/G
    int32_t head_size;             // D

    // The query heads [g,D] of a KV head, and its key or value [D].
    __device__ __forceinline__ const T* query_of(int64_t row, int kv_head) const {
        return token.query + row * token.query_row + kv_head * group * head_size;
    }
    __device__ __forceinline__ TokenChannel<T> entry_of(const HeadChannel<T>& channel, int64_t row, int kv_head) const {
        const int64_t start = row * token.entry_row + kv_head * head_size;
        return {channel, token.key + start, token.value + start};
    }

    // The destination of the rotated query of a KV head of the batch; null where it is not rotated here.
    __device__ __forceinline__ T* rotated_of(int64_t head) const {
        return token.rotated == nullptr ? nullptr : token.rotated + head * group * head_size;
    }
};

template <bool kInFormat, class T>
__device__ __forceinline__ void append_token(const AppendParams<T>& params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t row = blockIdx.y, head = row * params.kv_heads + blockIdx.x;
    const int kv_head = static_cast<int>(blockIdx.x), size = params.head_size;
    const HeadChannel<T> channel(params.token, row, size);
    const TokenChannel<T> entry = params.entry_of(channel, row, kv_head);
    if (threadIdx.x == 0) {
        params.arrivals[head] = 0;
    }
    if (T* const rotated = params.rotated_of(head); rotated != nullptr) {
        rotate_heads(channel, params.query_of(row, kv_head), rotated, params.group, size);
    }
    const int64_t slot = params.cache_lengths[row];
    if (has_slot(slot, params.capacity)) {
        const int64_t cache = head * params.capacity;
        store_token<kInFormat>(entry, params.keys.from(cache), params.values.from(cache), slot, size);
    }
}

// The first launch of dense attention, which keeps no bounds. Grid (G, B), a thread per channel.
template <class T>
__global__ void __launch_bounds__(kAppendThreads) append(const AppendParams<T> params) {
    append_token<false>(params);
}

// The same for caches in a format.
template <class T>
__global__ void __launch_bounds__(kAppendThreads) append_in_format(const AppendParams<T> params) {
    append_token<true>(params);
}

}  // namespace kvc
