// The page bounds of a block's chunk of pages on the chosen channels, in shared memory: see page_scores.cuh.
//
// They are copied 16 bytes at a time, asynchronously, one row per channel. In 16 bit every row starts at a multiple of
// 16 bytes (stored_pages.h). In fp32 rows of P elements start at any alignment, so the kernel copies the aligned span
// around the chunk and keeps the position of each row's first page. That span never leaves the KV head's table [2D,P],
// which starts and ends at a multiple of 16 bytes (2D is a multiple of 32). All copies are in flight together: one
// memory latency per block for any r.
#pragma once

#include <cstdint>

#include "kernels/append.cuh"
#include "kernels/copy_async.cuh"
#include "kernels/score_channels.cuh"
#include "kernels/stored_pages.h"

namespace kvc {

// Whether P is a multiple of a vector, whatever the capacity.
template <class T>
constexpr bool kAlignedRows = stored_pages(1, 1, sizeof(T)) % kVectorWidth<T> == 0;

// The bounds of a chunk in shared memory: page `page` of the chunk on the i-th best channel is
// values[start_of(i) + page].
template <class T>
struct StagedBounds {
    SharedSpan<T> values;
    SharedSpan<int32_t> first;  // where rows start if they are not aligned, else empty
    int row;                    // elements from one row to the next
    int rows;                   // of channels, best first, and of zeros behind them

    __device__ __forceinline__ int start_of(int i) const {
        if constexpr (kAlignedRows<T>) {
            return i * row;
        } else {
            return first[i];
        }
    }
};

// Memory for StagedBounds::first.
template <class T>
__device__ __forceinline__ SharedSpan<int32_t> starts_of_rows() {
    if constexpr (kAlignedRows<T>) {
        return SharedSpan<int32_t>(nullptr, 0);
    } else {
        KVC_SHARED(int32_t, first, KVC_LARGEST_HEAD_SIZE);
        return first;
    }
}

// Starts the copies of pages [start, start + count) of one KV head's table [2D,P], one vector per thread and row, and
// writes the rows of zeros.
template <class T>
__device__ __forceinline__ void stage_bounds(const T* __restrict__ table, int pages, int row_vectors,
                                             const GroupQuery& query, int start, int count, const StagedBounds<T>& to) {
    constexpr int kWidth = kVectorWidth<T>;
    const int place = static_cast<int>(threadIdx.x) % row_vectors * kWidth;  // of this thread's vector in its rows
    const int rows = kScoreThreads / row_vectors;
    int i = static_cast<int>(threadIdx.x) / row_vectors;
#pragma unroll 4
    for (; i < query.channels; i += rows) {
        const int element = query.chosen[i] * pages + start;  // below 512 · 2^20
        const int shift = kAlignedRows<T> ? 0 : element & (kWidth - 1);
        if (place < shift + count) {
            copy_async_16(&to.values[i * to.row + place], table + (element - shift + place));
        }
    }
    copy_async_commit();
#pragma unroll 1
    for (; i < to.rows; i += rows) {
        to.values.template cast<uint4>()[(i * to.row + place) / kWidth] = uint4{0, 0, 0, 0};
    }
}

// Raises the staged bounds of the appended token's page, which is `page` of the chunk; one thread per channel.
template <class T>
__device__ __forceinline__ void raise_staged(const StagedBounds<T>& staged, const GroupQuery& query, int page,
                                             const T* __restrict__ k_new) {
    const int i = static_cast<int>(threadIdx.x);
    if (i < query.channels) {
        T& bound = staged.values[staged.start_of(i) + page];
        bound = from_float<T>(raised_bound(to_float(bound), k_new, query.chosen[i], query.head_size));
    }
}

}  // namespace kvc
