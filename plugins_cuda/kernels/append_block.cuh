// Appends a turn's tokens to the caches of a KV head: keys and values, and the changes to their pages' bounds.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3, for the bounds; append.cuh documents their stored form.
//
//   append_block   token i of row b goes to slot cache_lengths[b] + i; a token without a slot is dropped
//   raise_bounds   the pages of those slots: one thread per page and channel takes the extremes of its new keys
//
// Bytes per row and KV head, n new tokens, s bytes per element: append_block reads and writes 4·s·D·n (K and V) in
// vectors of 16 bytes. raise_bounds reads s·D·n of keys and reads and writes two elements per page and channel; these are
// P elements apart, so a page costs up to 2·2D sectors of 32 bytes. A turn's matrix products cost a thousand times that.
//
// Determinism: every element has one writer; maxima are exact.
#pragma once

#include <cstdint>

#include "kernels/append.cuh"
#include "kernels/block_rows.cuh"
#include "kernels/bound_table.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"

namespace kvc {

constexpr int kBlockThreads = 256;
constexpr int kTokensPerBlock = 32;
constexpr int kRaisedPages = 8;

template <class T>
struct AppendBlockParams {
    const T* k_new;  // [B,G,M,D]
    const T* v_new;  // [B,G,M,D]
    T* k_cache;      // [B,G,C,D]
    T* v_cache;      // [B,G,C,D]
    const int64_t* cache_lengths;
    const int64_t* lengths;
    int64_t capacity;   // C
    int64_t block;      // M
    int32_t kv_heads;   // G
    int32_t head_size;  // D
};

// Grid (ceil(M / kTokensPerBlock), G, B).
template <class T>
__global__ void __launch_bounds__(kBlockThreads) append_block(const AppendBlockParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const BlockRow row = block_row(params.cache_lengths, params.lengths, blockIdx.z, params.capacity, params.block);
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y;
    const int64_t first = int64_t{blockIdx.x} * kTokensPerBlock;
    const int64_t room = params.capacity - row.stored;
    const int64_t end = min(first + kTokensPerBlock, min(row.count, room));
    const int32_t vectors = params.head_size / kVectorWidth<T>;
    const T* keys = params.k_new + head * params.block * params.head_size;
    const T* values = params.v_new + head * params.block * params.head_size;
    const int64_t slots = (head * params.capacity + row.stored) * params.head_size;
    for (int64_t item = threadIdx.x; item < (end - first) * vectors; item += kBlockThreads) {
        const int64_t place = first * params.head_size + item * kVectorWidth<T>;
        copy_vector(params.k_cache + slots + place, keys + place);
        copy_vector(params.v_cache + slots + place, values + place);
    }
}

template <class T>
struct RaiseBoundsParams {
    const T* k_new;  // [B,G,M,D]
    void* bounds;    // [B,G,2D,P], of T or fp8
    const int64_t* cache_lengths;
    const int64_t* lengths;
    int64_t block;      // M
    int64_t page_size;  // p
    int64_t pages;      // P
    int32_t kv_heads;   // G
    int32_t head_size;  // D
    bool fp8_bounds;
};

// Grid (ceil(pages that M tokens can touch / kRaisedPages), G, B).
template <class T>
__global__ void __launch_bounds__(kBlockThreads) raise_bounds(const RaiseBoundsParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const BlockRow row =
        block_row(params.cache_lengths, params.lengths, blockIdx.z, params.pages * params.page_size, params.block);
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y;
    const int64_t first_page = row.stored / params.page_size + int64_t{blockIdx.x} * kRaisedPages;
    const T* keys = params.k_new + head * params.block * params.head_size;
    const BoundTable<T> bounds =
        BoundTable<T>(params.bounds, params.fp8_bounds).from(head * 2 * params.head_size * params.pages);
    for (int32_t item = threadIdx.x; item < kRaisedPages * params.head_size; item += kBlockThreads) {
        const int64_t page = first_page + item / params.head_size;
        const int32_t channel = item % params.head_size;
        const int64_t first = max(page * params.page_size - row.stored, int64_t{0});
        const int64_t end = min((page + 1) * params.page_size - row.stored, row.count);
        if (page >= params.pages || first >= end) continue;
        const int64_t upper = channel * params.pages + page;
        const int64_t lower = (params.head_size + channel) * params.pages + page;
        ChannelBounds raised = {bounds.widen(bounds.load(upper)), bounds.widen(bounds.load(lower))};
        for (int64_t token = first; token < end; ++token) {
            raised.raise(to_float(keys[token * params.head_size + channel]));
        }
        bounds.store(upper, raised.maximum);
        bounds.store(lower, raised.negated_minimum);
    }
}

}  // namespace kvc
