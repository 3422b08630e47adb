// Page bounds of keys in a format: those of the dequantised keys (append.cuh documents how bounds are kept).
//
//   bound_stored_pages   all pages of a cache, after a compaction
//   raise_bounds_in_format  the pages that a turn's tokens join; a token is rounded as a cache would store it
//
// Bytes per KV head: the keys once, and the bounds once; a thread writes neighbouring pages of a channel where it can.
// Determinism: every bound has one writer; maxima are exact.
#pragma once

#include <cstdint>

#include "kernels/append.cuh"
#include "kernels/append_block.cuh"
#include "kernels/bound_table.cuh"
#include "kernels/stored_rows.cuh"

namespace kvc {

constexpr int kBoundedPages = 8;
constexpr int kBoundedChannels = 32;
static_assert(kBoundedPages * kBoundedChannels == kRowThreads);

struct StoredBoundsParams {
    VectorTable keys;              // [B,G,C,.]
    void* bounds;                  // [B,G,2D,P], of T or fp8
    const int64_t* cache_lengths;  // [B]: slots in use
    int64_t page_size;             // p
    int32_t capacity;              // C
    int32_t pages;                 // P
    int32_t kv_heads;              // G
    int32_t head_size;             // D
    int32_t channel_blocks;        // ceil(D / kBoundedChannels)
    bool fp8_bounds;
};

// Grid (ceil(P / kBoundedPages), G · channel_blocks, B). Neighbouring threads read neighbouring channels, and write
// neighbouring pages.
template <class T>
__global__ void __launch_bounds__(kRowThreads) bound_stored_pages(const StoredBoundsParams params) {
    start_next_launch();
    wait_for_previous_launch();
    KVC_SHARED(float, maxima, 2 * kRowThreads);  // [of K, of -K][channel][page]
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y / params.channel_blocks;
    const int first_channel = static_cast<int>(blockIdx.y % params.channel_blocks) * kBoundedChannels;
    const int first_page = static_cast<int>(blockIdx.x) * kBoundedPages;
    {
        const int channel = first_channel + thread % kBoundedChannels, page = first_page + thread / kBoundedChannels;
        const int64_t length = min(params.cache_lengths[blockIdx.z], int64_t{params.capacity});
        const int64_t end = min((page + 1) * params.page_size, length);
        ChannelBounds bounds = {lowest_finite<T>(), lowest_finite<T>()};
        if (channel < params.head_size) {
            for (int64_t slot = page * params.page_size; slot < end; ++slot) {
                bounds.raise(read_channel(params.keys.from(head * params.capacity + slot), channel));
            }
        }
        const int at = thread % kBoundedChannels * kBoundedPages + thread / kBoundedChannels;
        maxima[at] = bounds.maximum;
        maxima[kRowThreads + at] = bounds.negated_minimum;
    }
    __syncthreads();
    const int channel = first_channel + thread / kBoundedPages, page = first_page + thread % kBoundedPages;
    if (channel < params.head_size && page < params.pages) {
        const BoundTable<T> table(params.bounds, params.fp8_bounds);
        const int64_t row = head * 2 * params.head_size + channel;
        table.store(row * params.pages + page, maxima[thread]);
        table.store((row + params.head_size) * params.pages + page, maxima[kRowThreads + thread]);
    }
}

template <class T>
struct RaiseStoredParams {
    RaiseBoundsParams<T> block;
    VectorTable keys;  // their format, without addresses
};

// Grid (ceil(pages that M tokens can touch / kRaisedPages), G, B): a warp per page.
template <class T>
__global__ void __launch_bounds__(kRowThreads) raise_bounds_in_format(const RaiseStoredParams<T> stored_params) {
    static_assert(kRaisedPages == kRowWarps);
    start_next_launch();
    wait_for_previous_launch();
    const RaiseBoundsParams<T>& params = stored_params.block;
    const BlockRow row =
        block_row(params.cache_lengths, params.lengths, blockIdx.z, params.pages * params.page_size, params.block);
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y;
    const int64_t page = row.stored / params.page_size + int64_t{blockIdx.x} * kRaisedPages + warp_index();
    const int64_t first = max(page * params.page_size - row.stored, int64_t{0});
    const int64_t end = min((page + 1) * params.page_size - row.stored, row.count);
    if (page >= params.pages || first >= end) {
        return;
    }
    float high[kLaneChannels], negated_low[kLaneChannels];
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
        high[i] = negated_low[i] = -INFINITY;
    }
    for (int64_t token = first; token < end; ++token) {
        float key[kLaneChannels];
        load_lane_channels(params.k_new + (head * params.block + token) * params.head_size, params.head_size, key);
        store_vector(key, params.head_size, stored_params.keys);
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            high[i] = nan_max(high[i], key[i]);
            negated_low[i] = nan_max(negated_low[i], -key[i]);
        }
    }
    const BoundTable<T> bounds =
        BoundTable<T>(params.bounds, params.fp8_bounds).from(head * 2 * params.head_size * params.pages);
    const int channel = lane_index() * kLaneChannels;
    if (channel >= params.head_size) {
        return;
    }
    for (int i = 0; i < kLaneChannels; ++i) {
        const int64_t upper = (channel + i) * params.pages + page, lower = upper + params.head_size * params.pages;
        bounds.store(upper, nan_max(bounds.widen(bounds.load(upper)), high[i]));
        bounds.store(lower, nan_max(bounds.widen(bounds.load(lower)), negated_low[i]));
    }
}

}  // namespace kvc
