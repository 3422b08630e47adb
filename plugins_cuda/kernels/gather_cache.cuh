// Moves the kept rows of K and V into consecutive slots of the cache, and bounds the keys of its pages.
//
// Source: RocketKV, arXiv 2502.14051, end of algorithm 1 (the kept tokens) and section 3.3 (page bounds, counted over
// the compacted cache from slot 0). Bounds are channel-major [B,G,2D,P]: row d holds the page maxima of K, row D+d
// those of -K; a page without tokens holds the lowest finite value, and a NaN key makes its channel of the page NaN. In fp8
// (fp8.cuh) bounds are rounded up when they are written, and NaN becomes the largest number.
//
// Blocks own whole pages: any number of them runs at once. Where the caches are k and v themselves, the rows have been
// moved before (move_in_place.cuh), and only bounds and the zeros past a row's end remain.
//
// Bytes per row and KV head, s bytes per element, b per bound, `kept` = min(n, budget): reads 2·s·D·kept + 8·kept, writes
// 2·s·D·C (K and V with their zeros) + 2·b·D·P (bounds). In place: reads s·D·kept, writes 2·s·D·(C - kept) + 2·b·D·P.
// Every access to K and V is 16 bytes wide, kRowsInFlight of them per thread before the first is used. Bounds leave
// through shared memory, so that the pages of a block are neighbours in each of the 2D rows.
//
// Determinism: every element has one writer; maxima are exact, so their order does not matter.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/bound_table.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"
#include "kernels/shared.cuh"

namespace kvc {

constexpr int kGatherThreads = 256;
constexpr int kGatherBlocks = 3;  // of gather_cache on a multiprocessor: 48 KiB of rows in flight, 80 registers
constexpr int kRowsInFlight = 4;

// The division of a block's pages: one thread reduces one segment for its channels.
struct PageLayout {
    int32_t page_size;      // p, at most C
    int32_t pages;          // P
    int32_t segment_slots;  // slots of a page that one thread takes
    int32_t segments;       // of a page
    int32_t pages_per_block;

    __host__ __device__ int32_t columns() const { return pages_per_block * segments; }
};

template <class T>
struct GatherParams {
    int32_t batch;         // rows
    int32_t kv_heads;      // G
    int32_t head_size;     // D
    int32_t capacity;      // C
    int64_t stride_batch;  // of k and v, in elements
    int64_t stride_head;
    int64_t stride_token;
    const T* k;  // [B,G,S,D] by strides
    const T* v;
    const int32_t* indices;        // [B,G,C]: position in k and v of each slot, ascending
    const int64_t* cache_lengths;  // [B]: slots in use
    T* k_cache;                    // [B,G,C,D]
    T* v_cache;                    // [B,G,C,D]
    void* bounds;                  // [B,G,2D,P], of T or fp8; or null
    PageLayout layout;
    bool fp8_bounds;
    bool in_place;  // k and v are the caches: every slot holds its row when gather_cache runs
};

// Elements between the columns of a block's bounds in shared memory: 16 bytes beyond the 2D, against bank conflicts.
template <class T>
__host__ __device__ constexpr int32_t bounds_pitch(int32_t head_size) {
    return 2 * head_size + kVectorWidth<T>;
}

// One KV head of one row.
template <class T>
struct GatherHead {
    const T* source;         // its first row in k or v
    const int32_t* indices;  // row of `source` in each slot
    T* cache;                // its first slot
    int64_t stride_token;    // of `source`
    int32_t head_size;
    int32_t length;  // slots in use
    bool in_place;
};

template <class T>
__device__ __forceinline__ GatherHead<T> gather_head(const GatherParams<T>& params, bool is_key, int64_t row,
                                                     int64_t kv_head) {
    const int64_t head = row * params.kv_heads + kv_head;
    return {(is_key ? params.k : params.v) + row * params.stride_batch + kv_head * params.stride_head,
            params.indices + head * params.capacity,
            (is_key ? params.k_cache : params.v_cache) + head * params.capacity * params.head_size,
            params.stride_token,
            params.head_size,
            static_cast<int32_t>(params.cache_lengths[row]),
            params.in_place};
}

// Extremes of kVectorWidth neighbouring channels. They start at the lowest finite value, as in an empty page.
template <class T>
struct ChannelExtremes {
    float high[kVectorWidth<T>];
    float negated_low[kVectorWidth<T>];

    __device__ __forceinline__ ChannelExtremes() {
#pragma unroll
        for (int j = 0; j < kVectorWidth<T>; ++j) high[j] = negated_low[j] = lowest_finite<T>();
    }

    __device__ __forceinline__ void include(uint4 raw) {
        Vec<T> keys;
        memcpy(&keys, &raw, sizeof raw);
#pragma unroll
        for (int j = 0; j < kVectorWidth<T>; ++j) {
            const float key = to_float(keys.values[j]);
            high[j] = nan_max(high[j], key);
            negated_low[j] = nan_max(negated_low[j], -key);
        }
    }
};

// Copies the rows of slots first..end-1, for one vector of channels, and takes their extremes.
template <class T>
__device__ __forceinline__ void gather_rows(const GatherHead<T>& head, int32_t channel, int32_t first, int32_t end,
                                            ChannelExtremes<T>& extremes) {
    for (int32_t chunk = first; chunk < end; chunk += kRowsInFlight) {
        int32_t positions[kRowsInFlight];
        uint4 rows[kRowsInFlight] = {};
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j) {
            const int32_t slot = min(chunk + j, end - 1);
            positions[j] = head.in_place ? slot : head.indices[slot];
        }
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j) {
            if (chunk + j >= end) continue;
            rows[j] = platform::load_16_bytes(head.source + positions[j] * head.stride_token + channel);
        }
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j) {
            if (chunk + j >= end) continue;
            extremes.include(rows[j]);
            if (head.in_place) continue;
            platform::store_16_bytes(head.cache + int64_t{chunk + j} * head.head_size + channel, rows[j]);
        }
    }
}

// The pages of this block, [2D, pages] of the bounds, from the extremes of their segments.
template <class T>
__device__ __forceinline__ void write_bounds(const GatherParams<T>& params, SharedSpan<T> columns) {
    const PageLayout layout = params.layout;
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y;
    const int32_t outputs = 2 * params.head_size * layout.pages_per_block;
    for (int32_t output = threadIdx.x; output < outputs; output += kGatherThreads) {
        const int32_t row = output / layout.pages_per_block;
        const int32_t page_of_block = output % layout.pages_per_block;
        const int32_t page = static_cast<int32_t>(blockIdx.x) * layout.pages_per_block + page_of_block;
        if (page >= layout.pages) continue;
        float bound = lowest_finite<T>();
        for (int32_t segment = 0; segment < layout.segments; ++segment) {
            const int32_t column = page_of_block * layout.segments + segment;
            bound = nan_max(bound, to_float(columns[column * bounds_pitch<T>(params.head_size) + row]));
        }
        BoundTable<T>(params.bounds, params.fp8_bounds)
            .store((head * 2 * params.head_size + row) * layout.pages + page, bound);
    }
}

// Grid (ceil(P / pages_per_block), G, B); dynamic shared memory: columns() · bounds_pitch elements.
// A work item is one segment of K or of V and one vector of channels: neighbouring threads read neighbouring bytes.
template <class T>
__global__ void __launch_bounds__(kGatherThreads, kGatherBlocks) gather_cache(const GatherParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const PageLayout layout = params.layout;
    const int32_t vectors = params.head_size / kVectorWidth<T>;
    const int32_t items = layout.columns() * vectors;
    const int32_t pitch = bounds_pitch<T>(params.head_size);
    const SharedSpan<T> columns = dynamic_shared<T>(0, static_cast<size_t>(layout.columns()) * pitch);
    for (int32_t item = threadIdx.x; item < 2 * items; item += kGatherThreads) {
        const bool is_key = item < items;
        const int32_t column = (is_key ? item : item - items) / vectors;
        const int32_t channel = (is_key ? item : item - items) % vectors * kVectorWidth<T>;
        const int32_t page = static_cast<int32_t>(blockIdx.x) * layout.pages_per_block + column / layout.segments;
        const int32_t first = page * layout.page_size + column % layout.segments * layout.segment_slots;
        const int32_t end = min(min(first + layout.segment_slots, (page + 1) * layout.page_size), params.capacity);
        const GatherHead<T> head = gather_head(params, is_key, blockIdx.z, blockIdx.y);
        const bool bounded = is_key && params.bounds != nullptr;
        ChannelExtremes<T> extremes;
        // Rows that are already in place are read only for their bounds.
        if (bounded || !head.in_place) gather_rows(head, channel, first, min(end, head.length), extremes);
        for (int32_t slot = max(first, head.length); slot < end; ++slot) {
            platform::store_16_bytes(head.cache + int64_t{slot} * params.head_size + channel, uint4{0, 0, 0, 0});
        }
        if (!bounded) continue;
#pragma unroll
        for (int j = 0; j < kVectorWidth<T>; ++j) {
            columns[column * pitch + channel + j] = from_float<T>(extremes.high[j]);
            columns[column * pitch + params.head_size + channel + j] = from_float<T>(extremes.negated_low[j]);
        }
    }
    __syncthreads();
    if (params.bounds != nullptr) write_bounds(params, columns);
}

}  // namespace kvc
