// Scores the pages of every KV head for one decode step, and appends the step's token on the way.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3, steps 1 and 3 to 6 of hybrid attention: e[h,j] / T[h] with
// e[h,j] = sum over the r chosen channels d of q[h,d] · bound[j,d]. score_channels.cuh says which channels, and bounds.
//
//   in   query [B,H,D], bounds [B,G,2D,P] (row d: page maxima of K, row D+d: of -K), k_new, v_new [B,G,D]
//   out  scores fp32 [B,G,H/G,8U], for pages that hold tokens of rows that do not read all their entries anyway, and
//        statistics [B,G,H/G,U] of the units of such pages, 8 pages each (page_statistics.cuh);
//        k_cache, v_cache [B,G,C,D] with the token in them; arrivals [B,G] = 0 for the attention's merge
//
// Grid (chunks of pages, G, B). The bounds of a chunk are staged in shared memory first (staged_bounds.cuh); then tensor
// cores sum those of 16 bit (page_scores_tensor_core.cuh), multiply-adds those of fp32 (page_scores_fma.cuh).
//
// The block whose chunk holds the new token's page writes its key and value, and raises its staged copy of the page's
// bounds. Those in memory are raised by the next launch (append.cuh).
//
// Bytes per KV head: r P s (s bytes per element), g D s, 4 D s for the token; flops 2 g r P.
//
// Determinism: channels are added in an order that is the same for every page, chunk size and batch, so equal bounds
// give equal bits. The sum is multiplied by 1/T last: exact sums stay exact ties. e is a sum in fp32.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/append.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/page_scores_fma.cuh"
#include "kernels/page_scores_tensor_core.cuh"
#include "kernels/score_channels.cuh"
#include "kernels/scored_chunk.cuh"
#include "kernels/staged_bounds.cuh"

namespace kvc {

template <class T>
struct PageScoresParams {
    const T* query;          // [B,H,D]
    AppendParams<T> token;   // the new token, the caches, and the rows' lengths
    const T* bounds;         // [B,G,2D,P], before the append
    float* scores;           // [B,G,H/G,8U]
    ScoreStatistics* units;  // [B,G,H/G,U]
    AttentionLimits limits;
    int32_t group;        // H/G
    int32_t page_size;    // p
    int32_t pages;        // P
    int32_t top_r;        // r
    int32_t row_vectors;  // 16-byte vectors of a staged row: 16, 32 or 64, one thread each

    // Pages per block, whole units: a vector less than are staged where a row may start anywhere in its first one.
    __host__ __device__ __forceinline__ int chunk() const {
        return (row_vectors - (kAlignedRows<T> ? 0 : 1)) * kVectorWidth<T> / kUnitPages * kUnitPages;
    }
};

// How the bounds of T are summed for kHeads query heads at a time: 1, 2 or 4 in fp32, the group rounded up to 4, 8 or
// 16 in 16 bit.
template <class T, int kHeads>
using PageScorer = std::conditional_t<sizeof(T) == 2, TensorCoreScorer<T, kHeads>, FmaScorer<kHeads>>;

// Layout of the dynamic shared memory; offsets in bytes, multiples of 16. The staged bounds come first.
struct ScoreLayout {
    int row;     // elements from one staged row to the next
    int rows;    // staged
    int query;   // float [g,D]
    int scorer;  // what the scorer needs
    int total;
};

template <class T, int kHeads>
__host__ __device__ __forceinline__ ScoreLayout score_layout(int row_vectors, int channels, int group, int head_size) {
    using Scorer = PageScorer<T, kHeads>;
    ScoreLayout layout;
    layout.row = (row_vectors + Scorer::kSpareVectors) * kVectorWidth<T>;
    layout.rows = Scorer::rows(channels);
    layout.query = layout.rows * layout.row * static_cast<int>(sizeof(T));
    layout.scorer = layout.query + group * head_size * static_cast<int>(sizeof(float));
    layout.total = layout.scorer + Scorer::shared_bytes(channels, group);
    return layout;
}

// What the channel of a staged row contributes: the query on it, negated where a minimum is read as a negated maximum,
// nothing for a row of zeros. And where the row starts, unless it is aligned. One thread per row.
template <class T, class Scorer>
__device__ __forceinline__ void describe_rows(const GroupQuery& query, int pages, int start,
                                              const StagedBounds<T>& staged, const Scorer& scorer) {
    const int i = static_cast<int>(threadIdx.x);
    if (i < query.channels) {
        const int row = query.chosen[i];
        if constexpr (!kAlignedRows<T>) {
            staged.first[i] = i * staged.row + ((row * pages + start) & (kVectorWidth<T> - 1));
        }
        scorer.store_query(query, i, query.channel_of(row), row < query.head_size ? 1.0f : -1.0f);
    } else if (i < staged.rows) {
        scorer.store_query(query, i, 0, 0.0f);
    }
}

// What a block does with pages [start, start + chunk) of a row.
struct ChunkTask {
    int start;
    int count;     // pages to score: 0 past the row's end, and where the row is read as a whole
    int joined;    // page that the new token joins, from `start` on: the row's last one
    int tokens;    // in that page
    bool appends;  // whether it is in the chunk
};

__device__ __forceinline__ ChunkTask chunk_task(const AttendedRow& row, int page_size, int chunk) {
    const int start = static_cast<int>(blockIdx.x) * chunk;
    if (row.length == 0) {
        return {start, 0, 0, 0, false};
    }
    const int last = (row.length - 1) / page_size;
    const int joined = last - start;
    const bool appends = joined >= 0 && joined < chunk;
    const int stored = joined < 0 ? 0 : appends ? joined + 1 : chunk;
    return {start, row.all ? 0 : stored, joined, row.length - last * page_size, appends};
}

// Stages and scores the pages of a task, which has some, of one KV head.
template <class T, int kHeads>
__device__ __forceinline__ void score_pages(const PageScoresParams<T>& params, const ChunkTask& task,
                                            const QueryChannel& own, const GroupQuery& query, int64_t head) {
    const ScoreLayout layout =
        score_layout<T, kHeads>(params.row_vectors, query.channels, query.group, query.head_size);
    const StagedBounds<T> staged = {dynamic_shared<T>(0, layout.rows * layout.row), starts_of_rows<T>(), layout.row,
                                    layout.rows};
    const PageScorer<T, kHeads> scorer(query, layout.scorer);

    choose_channels(own, query);
    __syncthreads();
    const T* table = params.bounds + head * 2 * query.head_size * params.pages;
    stage_bounds(table, params.pages, params.row_vectors, query, task.start, task.count, staged);
    describe_rows(query, params.pages, task.start, staged, scorer);
    find_temperatures(query);
    copy_async_wait<0>();
    __syncthreads();
    if (task.appends) {
        raise_staged(staged, query, task.joined, params.token.k_new + head * query.head_size);
        __syncthreads();
    }
    const int64_t units = units_of(params.pages);
    const ScoredChunk chunk = {
        params.scores + head * query.group * units * kUnitPages + task.start,
        params.units + head * query.group * units + task.start / kUnitPages,
        units,
        task.count,
        {task.joined, static_cast<float>(task.tokens), static_cast<float>(params.page_size)},
    };
    scorer.score(staged, query, chunk);
}

template <class T, int kHeads>
__global__ void __launch_bounds__(kScoreThreads) page_scores(const PageScoresParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    KVC_SHARED(int32_t, chosen, KVC_LARGEST_HEAD_SIZE);
    KVC_SHARED(float, inverse_temperature, KVC_LARGEST_GROUP);
    const AppendParams<T>& token = params.token;
    const int size = token.head_size, group = params.group;
    const int query_start = score_layout<T, kHeads>(params.row_vectors, params.top_r, group, size).query;
    const GroupQuery query = {
        dynamic_shared<float>(query_start, group * size), chosen, inverse_temperature, group, size, params.top_r};
    const int64_t head = int64_t{blockIdx.z} * token.kv_heads + blockIdx.y;
    const int64_t cache_length = token.cache_lengths[blockIdx.z];
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        token.arrivals[head] = 0;
    }
    // Before the length is used, so that both loads are in flight together.
    const QueryChannel own = read_query(params.query + head * group * size, query);
    const AttendedRow row = attended_row(cache_length, params.limits);
    const ChunkTask task = chunk_task(row, params.page_size, params.chunk());
    if (task.appends) {
        append_row(token.k_new + head * size, token.v_new + head * size, token.k_cache + head * size * token.capacity,
                   token.v_cache + head * size * token.capacity, cache_length, size);
    }
    if (task.count > 0) {
        score_pages<T, kHeads>(params, task, own, query, head);
    }
}

}  // namespace kvc
