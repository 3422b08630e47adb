// The page bounds of a block's chunk of pages on the chosen channels, in shared memory: see page_scores.cuh.
//
// They are copied asynchronously, one row per channel: 16 bytes at a time, or, in clusters, a row at once. In 16 and 8 bit
// every row starts at a multiple of 16 bytes (stored_pages.h). In fp32 rows of P elements start at any alignment, so the
// kernel copies the aligned span around the chunk and keeps the position of each row's first page. That span never leaves
// the KV head's table [2D,P], which starts and ends at a multiple of 16 bytes (2D is a multiple of 32). All copies are in
// flight together: one memory latency per block for any r.
#pragma once

#include <cstdint>

#include "kernels/cluster_inbox.cuh"
#include "kernels/copy_async.cuh"
#include "kernels/fp8.cuh"
#include "kernels/numeric.cuh"
#include "kernels/score_channels.cuh"
#include "kernels/shared.cuh"
#include "kernels/stored_pages.h"
#include "kvc/limits.h"

namespace kvc {

// True if P is a multiple of a vector, for any capacity.
template <class Bound>
constexpr bool kAlignedRows = stored_pages(1, 1, sizeof(Bound), kIsFp8<Bound>) % kVectorWidth<Bound> == 0;

// The bounds of a chunk in shared memory: page `page` of the chunk on the i-th best channel is
// values[start_of(i) + page].
template <class Bound>
struct StagedBounds {
    SharedSpan<Bound> values;
    SharedSpan<int32_t> first;  // the start of each row if rows are not aligned, else empty
    int row;                    // elements from one row to the next
    int rows;                   // of channels, best first, and of zeros after them

    __device__ __forceinline__ int start_of(int i) const {
        if constexpr (kAlignedRows<Bound>) {
            return i * row;
        } else {
            return first[i];
        }
    }
};

// Memory for StagedBounds::first.
template <class Bound>
__device__ __forceinline__ SharedSpan<int32_t> starts_of_rows() {
    if constexpr (kAlignedRows<Bound>) {
        return SharedSpan<int32_t>(nullptr, 0);
    } else {
        KVC_SHARED(int32_t, first, KVC_LARGEST_HEAD_SIZE);
        return first;
    }
}

// The number of bits to shift by instead of dividing by `value`, a power of two that the compiler does not know: a
// division takes the time of four loads from shared memory.
__device__ __forceinline__ int log2_of(int value) { return __ffs(value) - 1; }

// The rows that a thread stages: four at a time, one vector each. kScoreThreads / row_vectors threads have a vector of
// the same pages and take turns.
class StagedQuads {
public:
    // `quads`: the numbers of the rows to stage, four to a vector; the thread's first four are read now.
    __device__ __forceinline__ StagedQuads(const uint4* quads, int count, int row_vectors)
        : quads_(quads),
          count_(count),
          step_(kScoreThreads >> log2_of(row_vectors)),
          own_(static_cast<int>(threadIdx.x) >> log2_of(row_vectors)) {
        read_next(own_);
    }

    // Calls visit(i, row) for every row of this thread, the i-th best. The next four are read meanwhile.
    template <class Visit>
    __device__ __forceinline__ void for_each(const Visit& visit) {
#pragma unroll 1
        for (int quad = own_; quad < count_; quad += step_) {
            const uint4 rows = next_;
            read_next(quad + step_);
            visit(4 * quad, static_cast<int>(rows.x));
            visit(4 * quad + 1, static_cast<int>(rows.y));
            visit(4 * quad + 2, static_cast<int>(rows.z));
            visit(4 * quad + 3, static_cast<int>(rows.w));
        }
    }

    // Calls visit(i) for this thread's share of the rows [first, end).
    template <class Visit>
    __device__ __forceinline__ void for_each_of(int first, int end, const Visit& visit) const {
#pragma unroll 1
        for (int i = first + own_; i < end; i += step_) {
            visit(i);
        }
    }

private:
    __device__ __forceinline__ void read_next(int quad) {
        if (quad < count_) {
            next_ = platform::load_vector_of<uint4>(quads_ + quad);
        }
    }

    const uint4* quads_;
    int count_;
    int step_;  // between this thread's
    int own_;   // its first
    uint4 next_{};
};

// Starts the copies of `row_bytes` of every row, whole vectors from page `start` on, of one KV head's table [2D,P] on the
// chosen channels, and writes the rows of zeros. A row is one copy, by a lane of a warp, which inbox_of(row) expects; there
// is none where it has no bytes. Rows are aligned, and `start` is a multiple of a vector's pages.
template <class Bound, class InboxOf>
__device__ __forceinline__ void stage_bounds_in_bulk(const Bound* table, int pages, const SharedSpan<int32_t>& chosen,
                                                     int channels, int start, uint32_t row_bytes,
                                                     const StagedBounds<Bound>& to, const InboxOf& inbox_of) {
    static_assert(kAlignedRows<Bound>);
    static_assert(kScoreWarps * kWarpSize >= KVC_LARGEST_HEAD_SIZE, "every row has a lane");
    constexpr int kWidth = kVectorWidth<Bound>;
    if (const int i = lane_index() * kScoreWarps + warp_index(); i < channels && row_bytes > 0) {
        const auto row = static_cast<uint32_t>(chosen[i]) * static_cast<uint32_t>(pages);
        inbox_of(i).copy(to.values.part(i * to.row, row_bytes / sizeof(Bound)),
                         table + (row + static_cast<uint32_t>(start)), row_bytes);
    }
    const SharedSpan<uint4> all = to.values.template cast<uint4>();
    const int end = to.rows * to.row / kWidth;
#pragma unroll 1
    for (int i = channels * to.row / kWidth + static_cast<int>(threadIdx.x); i < end; i += kScoreThreads) {
        all[i] = uint4{0, 0, 0, 0};
    }
}

// Starts the copies of pages [start, start + count) of one KV head's table [2D,P] on `channels` rows, and writes the rows
// of zeros. A row has `row_vectors` vectors, a power of two, each staged by a thread. The caller commits the copies. Where
// rows are aligned, `start` is a multiple of a vector's pages.
template <class Bound>
__device__ __forceinline__ void stage_bounds(const Bound* __restrict__ table, int pages, int row_vectors,
                                             StagedQuads& quads, int channels, int start, int count,
                                             const StagedBounds<Bound>& to) {
    constexpr int kWidth = kVectorWidth<Bound>;
    // The place of this thread's vector in its rows. Elements of a table are below 512 · 2^20.
    const int place = (static_cast<int>(threadIdx.x) & (row_vectors - 1)) * kWidth;
    if constexpr (kAlignedRows<Bound>) {
        // Few instructions for each copy: blocks with many pages have hundreds, and offsets of 32 bits are enough.
        const char* const bytes = reinterpret_cast<const char*>(table);
        const auto own = static_cast<uint32_t>((start + place) * static_cast<int>(sizeof(Bound)));
        const auto row_bytes = static_cast<uint32_t>(pages * static_cast<int>(sizeof(Bound)));
        const int copied = place < count ? channels : 0;
        quads.for_each([&](int i, int row) {
            if (i < copied) {
                copy_async_16(&to.values[i * to.row + place], bytes + (static_cast<uint32_t>(row) * row_bytes + own));
            }
        });
    } else {
        quads.for_each([&](int i, int row) {
            const int element = row * pages + start, shift = element & (kWidth - 1);
            if (i < channels) {
                if (place < shift + count) {
                    copy_async_16(&to.values[i * to.row + place], table + (element - shift + place));
                }
                if (place == 0) {
                    to.first[i] = i * to.row + shift;
                }
            }
        });
    }
    quads.for_each_of(channels, to.rows, [&](int i) {
        to.values.template cast<uint4>()[(i * to.row + place) / kWidth] = uint4{0, 0, 0, 0};
    });
}

}  // namespace kvc
