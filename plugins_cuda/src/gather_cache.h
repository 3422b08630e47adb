// Launches of the kernels that move the kept rows of a prompt's cache and bound its pages.
#pragma once

#include <algorithm>

#include "kernels/gather_cache.cuh"
#include "kernels/move_in_place.cuh"
#include "kernels/stored_bounds.cuh"
#include "kernels/stored_pages.h"
#include "kvc/compact.h"
#include "src/cache_tables.h"
#include "src/launch.h"
#include "src/validate.h"

namespace kvc {

/// Slots per block, about 48: enough bytes for a block, and enough blocks for a whole GPU at batch 1. Without bounds,
/// the unit that is shared out is the number of slots that one thread copies.
template <class T>
PageLayout page_layout(int32_t capacity, int32_t page_size, bool with_bounds, int32_t fp8_bounds) {
    constexpr int32_t kSlotsPerBlock = 48;
    constexpr int32_t kMostColumns = 32;
    PageLayout layout{};
    layout.page_size = std::min(with_bounds ? page_size : kRowsInFlight, capacity);
    layout.pages = with_bounds ? static_cast<int32_t>(stored_pages(capacity, page_size, sizeof(T), fp8_bounds))
                               : ceil_div(capacity, layout.page_size);
    layout.segment_slots = std::max(kRowsInFlight, ceil_div(layout.page_size, kMostColumns));
    layout.segments = ceil_div(layout.page_size, layout.segment_slots);
    layout.pages_per_block = std::clamp(kSlotsPerBlock / layout.page_size, 1, kMostColumns);
    return layout;
}

/// Queues gather_cache: rows into their slots (unless they are there already), zeros past a row's end, page bounds.
template <class T>
void launch_gather(const KvcCompactParams& params, Stream& stream) {
    GatherParams<T> gather{};
    gather.batch = params.batch;
    gather.kv_heads = params.kv_heads;
    gather.head_size = params.head_size;
    gather.capacity = static_cast<int32_t>(params.capacity);
    gather.stride_batch = params.kv_stride_batch;
    gather.stride_head = params.kv_stride_head;
    gather.stride_token = params.kv_stride_token;
    gather.k = static_cast<const T*>(params.k);
    gather.v = static_cast<const T*>(params.v);
    gather.indices = params.indices;
    gather.cache_lengths = params.cache_lengths;
    gather.k_cache = static_cast<T*>(params.k_cache);
    gather.v_cache = static_cast<T*>(params.v_cache);
    gather.bounds = params.bounds;
    gather.fp8_bounds = params.fp8_bounds != 0;
    gather.layout = page_layout<T>(gather.capacity, params.page_size, params.bounds != nullptr, params.fp8_bounds);
    gather.in_place = compacts_in_place(params);
    const dim3 grid =
        grid_of(ceil_div(gather.layout.pages, gather.layout.pages_per_block), params.kv_heads, params.batch);
    const size_t shared_bytes = sizeof(T) * gather.layout.columns() * bounds_pitch<T>(params.head_size);
    launch<gather_cache<T>>("gather_cache", grid, dim3(kGatherThreads), shared_bytes, stream, gather);
}

/// Queues the bounds of all pages of a cache in a format.
template <class T, class Params>
void launch_stored_bounds(const Params& params, const VectorTable& keys, Stream& stream) {
    StoredBoundsParams bounds{};
    bounds.keys = keys;
    bounds.bounds = params.bounds;
    bounds.cache_lengths = params.cache_lengths;
    bounds.page_size = params.page_size;
    bounds.capacity = static_cast<int32_t>(params.capacity);
    bounds.pages = static_cast<int32_t>(stored_pages(params.capacity, params.page_size, sizeof(T), params.fp8_bounds));
    bounds.kv_heads = params.kv_heads;
    bounds.head_size = params.head_size;
    bounds.channel_blocks = ceil_div(params.head_size, kBoundedChannels);
    bounds.fp8_bounds = params.fp8_bounds != 0;
    const dim3 grid =
        grid_of(ceil_div(bounds.pages, kBoundedPages), int64_t{params.kv_heads} * bounds.channel_blocks, params.batch);
    launch<bound_stored_pages<T>>("bound_stored_pages", grid, dim3(kRowThreads), 0, stream, bounds);
}

/// Queues gather_in_format, and the bounds where the caller wants them.
template <class T>
void launch_gather_in_format(const KvcCompactParams& params, Stream& stream) {
    const CachePair tables = cache_tables(params);
    GatherInFormatParams<T> gather{};
    gather.k = static_cast<const T*>(params.k);
    gather.v = static_cast<const T*>(params.v);
    gather.keys = tables.keys;
    gather.values = tables.values;
    gather.indices = params.indices;
    gather.cache_lengths = params.cache_lengths;
    gather.stride_batch = params.kv_stride_batch;
    gather.stride_head = params.kv_stride_head;
    gather.stride_token = params.kv_stride_token;
    gather.kv_heads = params.kv_heads;
    gather.head_size = params.head_size;
    gather.capacity = static_cast<int32_t>(params.capacity);
    const dim3 grid = grid_of(ceil_div(params.capacity, int64_t{kRowsOfBlock}), params.kv_heads, params.batch);
    launch<gather_in_format<T>>("gather_in_format", grid, dim3(kRowThreads), 0, stream, gather);
    if (params.bounds != nullptr) {
        launch_stored_bounds<T>(params, tables.keys, stream);
    }
}

/// Queues gather_stored for a turn's joined tables, and the bounds where the caller wants them.
template <class T>
void launch_gather_stored(const KvcCompactTurnParams& params, Stream& stream) {
    const CachePair tables = cache_tables(params), joined = joined_tables(params);
    GatherStoredParams gather{};
    gather.k = joined.keys;
    gather.v = joined.values;
    gather.keys = tables.keys;
    gather.values = tables.values;
    gather.indices = params.indices;
    gather.cache_lengths = params.cache_lengths;
    gather.stored = params.prompt_length;
    gather.kv_heads = params.kv_heads;
    gather.capacity = static_cast<int32_t>(params.capacity);
    const dim3 grid = grid_of(ceil_div(params.capacity, int64_t{kRowsOfBlock}), params.kv_heads, params.batch);
    launch<gather_stored>("gather_stored", grid, dim3(kRowThreads), 0, stream, gather);
    if (params.bounds != nullptr) {
        launch_stored_bounds<T>(params, tables.keys, stream);
    }
}

/// Queues move_in_place, which moves the kept rows to the front of the caches that hold them.
template <class T>
void launch_move_in_place(const KvcCompactParams& params, Stream& stream) {
    MoveParams<T> move{};
    move.batch = params.batch;
    move.kv_heads = params.kv_heads;
    move.head_size = params.head_size;
    move.capacity = static_cast<int32_t>(params.capacity);
    move.slices = ceil_div(params.head_size / kVectorWidth<T>, kSliceVectors);
    move.k_cache = static_cast<T*>(params.k_cache);
    move.v_cache = static_cast<T*>(params.v_cache);
    move.indices = params.indices;
    move.cache_lengths = params.cache_lengths;
    const dim3 grid = grid_of(2 * move.slices, params.kv_heads, params.batch);
    launch<move_in_place<T>>("move_in_place", grid, dim3(kMoveThreads), 0, stream, move);
}

}  // namespace kvc
