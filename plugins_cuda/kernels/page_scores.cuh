// Scores the pages of every KV head for one decode step.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3, step 5 of hybrid attention: e[h,j] / T[h] with
// e[h,j] = sum over the r chosen channels d of q[h,d] · bound[j,d]. score_channels.cuh says which channels, and bounds.
//
//   in   prepared queries (prepared_query.cuh), bounds [B,G,2D,P] (row d: page maxima of K, row D+d: of -K), of the cache's
//        type or fp8
//   out  scores fp32 [B,G,H/G,8U], for pages that hold tokens of rows that do not read all their entries anyway, and
//        statistics [B,G,H/G,U] of the units of such pages, 8 pages each (page_statistics.cuh)
//
// Grid (chunks of pages, G, B). The bounds of a chunk are staged in shared memory first (staged_bounds.cuh); then tensor
// cores sum those of a 16-bit cache (page_scores_tensor_core.cuh), multiply-adds those of a fp32 one (page_scores_fma.cuh).
//
// Bytes per KV head: r P s (s bytes per bound), and the prepared query, for every block from L2; flops 2 g r P.
//
// Determinism: channels are added in an order that is the same for every page, chunk size and batch, so equal bounds
// give equal bits. The sum is multiplied by 1/T last: exact sums stay exact ties. e is a sum in fp32.
#pragma once

#include <cstdint>

#include "kernels/attended_row.cuh"
#include "kernels/copy_async.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/prepared_query.cuh"
#include "kernels/scored_chunk.cuh"
#include "kernels/staged_bounds.cuh"

namespace kvc {

template <class Bound>
struct PageScoresParams {
    const uint4* prepared;         // [B,G,vectors of a prepared query]
    const Bound* bounds;           // [B,G,2D,P]
    const int64_t* cache_lengths;  // [B]: entries before the append
    float* scores;                 // [B,G,H/G,8U]
    ScoreStatistics* units;        // [B,G,H/G,U]
    AttentionLimits limits;
    int32_t kv_heads;     // G
    int32_t group;        // H/G
    int32_t head_size;    // D
    int32_t page_size;    // p
    int32_t pages;        // P
    int32_t top_r;        // r
    int32_t row_vectors;  // 16-byte vectors of a staged row: 16, 32 or 64, one thread each

    // Pages per block, whole units: one vector fewer than staged where a row may start anywhere in its first one.
    __host__ __device__ __forceinline__ int chunk() const {
        return (row_vectors - (kAlignedRows<Bound> ? 0 : 1)) * kVectorWidth<Bound> / kUnitPages * kUnitPages;
    }
};

// Layout of the dynamic shared memory; offsets in bytes, multiples of 16. The staged bounds come first.
struct ScoreLayout {
    int row;      // elements from one staged row to the next
    int rows;     // staged
    int query;    // temperatures and factors of the prepared query
    int factors;  // the factors alone
    int scratch;  // of the scorer
    int total;
};

template <class T, int kHeads, class Bound>
__host__ __device__ __forceinline__ ScoreLayout score_layout(int row_vectors, int channels, int group) {
    using Scorer = PageScorer<T, kHeads, Bound>;
    constexpr int kVectorBytes = static_cast<int>(sizeof(uint4));
    const PreparedLayout prepared = prepared_layout<Scorer>(channels, group);
    ScoreLayout layout;
    layout.row = (row_vectors + Scorer::kSpareVectors) * kVectorWidth<Bound>;
    layout.rows = Scorer::rows(channels);
    layout.query = layout.rows * layout.row * static_cast<int>(sizeof(Bound));
    layout.factors = layout.query + (prepared.factors - prepared.temperatures) * kVectorBytes;
    layout.scratch = layout.query + (prepared.total - prepared.temperatures) * kVectorBytes;
    layout.total = layout.scratch + Scorer::kScratchBytes;
    return layout;
}

// The work of a block on pages [start, start + chunk) of a row.
struct ChunkTask {
    int start;
    int count;   // pages to score: 0 past the row's end, and where the row is read as a whole
    int last;    // the row's last page, from `start` on
    int tokens;  // in that page
};

// `page`: the row's last one.
__device__ __forceinline__ ChunkTask chunk_task(const AttendedRow& row, int page, int page_size, int chunk) {
    const int start = static_cast<int>(blockIdx.x) * chunk;
    if (row.all) {
        return {start, 0, 0, 0};
    }
    return {start, max(min(page + 1 - start, chunk), 0), page - start, row.length - page * page_size};
}

// Starts to copy temperatures and factors of a prepared query to byte `start` of the dynamic shared memory. The caller
// commits them.
__device__ __forceinline__ void copy_query(const uint4* prepared, const PreparedLayout& layout, int start) {
    const int count = layout.total - layout.temperatures;
    const SharedSpan<uint4> to = dynamic_shared<uint4>(start, count);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kScoreThreads) {
        copy_async_16(&to[i], prepared + layout.temperatures + i);
    }
}

template <class T, int kHeads, class Bound>
__global__ void __launch_bounds__(kScoreThreads) page_scores(const PageScoresParams<Bound> params) {
    start_next_launch();
    wait_for_previous_launch();
    using Scorer = PageScorer<T, kHeads, Bound>;
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y;
    const PreparedLayout prepared = prepared_layout<Scorer>(params.top_r, params.group);
    const uint4* query = params.prepared + head * prepared.total;
    const int64_t cache_length = params.cache_lengths[blockIdx.z];
    StagedQuads quads(query, prepared.temperatures, params.row_vectors);  // on their way together with the length
    const AttendedRow row = attended_row(cache_length, params.limits);
    const ChunkTask task = chunk_task(row, (row.length - 1) / params.page_size, params.page_size, params.chunk());
    if (task.count == 0) {
        return;
    }
    const ScoreLayout layout = score_layout<T, kHeads, Bound>(params.row_vectors, params.top_r, params.group);
    const StagedBounds<Bound> staged = {dynamic_shared<Bound>(0, layout.rows * layout.row), starts_of_rows<Bound>(),
                                        layout.row, layout.rows};
    copy_query(query, prepared, layout.query);
    stage_bounds(params.bounds + head * 2 * params.head_size * params.pages, params.pages, params.row_vectors, quads,
                 params.top_r, task.start, task.count, staged);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    const int64_t units = units_of(params.pages);
    const ScoredChunk chunk = {
        params.scores + head * params.group * units * kUnitPages + task.start,
        params.units + head * params.group * units + task.start / kUnitPages,
        units,
        task.count,
        {task.last, static_cast<float>(task.tokens), static_cast<float>(params.page_size)},
    };
    const ScoredHeads heads = {dynamic_shared<float>(layout.query, params.group), params.group};
    Scorer(params.top_r, params.group, layout.factors, layout.scratch).score(staged, heads, chunk);
}

}  // namespace kvc
