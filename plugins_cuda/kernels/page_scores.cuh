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
// Grid (chunks of pages, G, B). The bounds of a chunk are staged in shared memory first (staged_bounds.cuh).
//
// The block whose chunk holds the new token's page writes its key and value, and raises its staged copy of the page's
// bounds. Those in memory are raised by the next launch (append.cuh).
//
// Bytes per KV head: r P s (s bytes per element), g D s, 4 D s for the token; flops 2 g r P.
//
// Determinism: channels are added in kChannelParts runs, best first within a run, the runs in order. The order is the
// same for every page, chunk size and batch, so equal bounds give equal bits. The sum is divided by T last: exact sums stay
// exact ties. e is an fp32 sum of products with fp32 rounding each; nvcc may fuse them.
#pragma once

#include <cstdint>

#include "kernels/append.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/page_statistics.cuh"
#include "kernels/score_channels.cuh"
#include "kernels/staged_bounds.cuh"

namespace kvc {

constexpr int kChannelParts = 4;                           // runs of channels, summed by different threads
constexpr int kPageLanes = kScoreThreads / kChannelParts;  // threads of one run
constexpr int kPagesPerThread = 2;                         // pages that share one read of the query
constexpr int kBlockPages = kPageLanes * kPagesPerThread;  // pages scored between two barriers
static_assert(kBlockPages % kUnitPages == 0, "no unit is in two of them");

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

    // Pages per block, whole units: a vector less than are staged, for a row may start anywhere in its first one.
    __host__ __device__ __forceinline__ int chunk() const {
        return (row_vectors - 1) * kVectorWidth<T> / kUnitPages * kUnitPages;
    }
};

// A tile of kHeads query heads on one channel, read as one vector.
template <int kHeads>
struct alignas(sizeof(float) * kHeads) HeadTile {
    float value[kHeads];
};

// Layout of the dynamic shared memory; offsets in bytes, multiples of 16. The staged bounds come first.
struct ScoreLayout {
    int row;           // elements of a staged row
    int tiles;         // tiles of kHeads query heads
    int query;         // float [g,D]
    int signed_query;  // HeadTile [tiles,r]
    int partials;      // float [kChannelParts,kHeads,kBlockPages]
    int total;
};

template <class T, int kHeads>
__host__ __device__ __forceinline__ ScoreLayout score_layout(int row_vectors, int channels, int group, int head_size) {
    constexpr int kFloat = static_cast<int>(sizeof(float));
    ScoreLayout layout;
    layout.row = row_vectors * kVectorWidth<T>;
    layout.tiles = (group + kHeads - 1) / kHeads;
    layout.query = channels * layout.row * static_cast<int>(sizeof(T));
    layout.signed_query = layout.query + group * head_size * kFloat;
    const int queries_end = layout.signed_query + channels * layout.tiles * kHeads * kFloat;
    layout.partials = (queries_end + 15) / 16 * 16;
    layout.total = layout.partials + kChannelParts * kHeads * kBlockPages * kFloat;
    return layout;
}

// What a chosen channel contributes: the query on it, negated where a minimum is read as a negated maximum, zero past the
// last head; and where its staged row starts. One thread per channel.
template <class T, int kHeads>
__device__ __forceinline__ void describe_channels(const GroupQuery& query, int pages, int start, int tiles,
                                                  SharedSpan<float> signed_query, const StagedBounds<T>& staged) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= query.channels) {
        return;
    }
    const int row = query.chosen[i];
    const int channel = query.channel_of(row);
    staged.first[i] = i * staged.row + ((row * pages + start) & (kVectorWidth<T> - 1));
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int j = 0; j < kHeads; ++j) {
            const int head = tile * kHeads + j;
            const float q = head < query.group ? query.values[head * query.head_size + channel] : 0.0f;
            signed_query[(tile * query.channels + i) * kHeads + j] = row < query.head_size ? q : -q;
        }
    }
}

// This thread's run of channels for its pages from first_page on, for one tile of heads -> partials.
template <class T, int kHeads>
__device__ __forceinline__ void add_channels(const StagedBounds<T>& staged, SharedSpan<HeadTile<kHeads>> query,
                                             int channels, int first_page, int count, SharedSpan<float> partials) {
    const int part = static_cast<int>(threadIdx.x) / kPageLanes;
    const int lane = static_cast<int>(threadIdx.x) % kPageLanes;
    const int run = (channels + kChannelParts - 1) / kChannelParts;
    const int end = (part + 1) * run < channels ? (part + 1) * run : channels;
    const int elements = channels * staged.row;
    const int low = first_page + lane < count ? first_page + lane : count - 1;
    const int high = low + kPageLanes < count ? low + kPageLanes : count - 1;
    const SharedSpan<T> pages[] = {staged.values.part(low, elements - low), staged.values.part(high, elements - high)};
    float sum[kPagesPerThread][kHeads] = {};
#pragma unroll 4
    for (int i = part * run; i < end; ++i) {
        const HeadTile<kHeads> q = query[i];
        const int first = staged.first[i];
#pragma unroll
        for (int k = 0; k < kPagesPerThread; ++k) {
            const float bound = to_float(pages[k][first]);
#pragma unroll
            for (int head = 0; head < kHeads; ++head) {
                sum[k][head] += q.value[head] * bound;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kPagesPerThread; ++k) {
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
            partials[(part * kHeads + head) * kBlockPages + lane + k * kPageLanes] = sum[k][head];
        }
    }
}

// The sums of a thread's pages over one run, read as one vector.
struct alignas(sizeof(float) * kPagesPerThread) PageTile {
    float value[kPagesPerThread];
};

// The staged pages of a chunk that are scored, and where their scores go.
struct ScoredChunk {
    float* scores;           // [g,8U], from the first page of the chunk on
    ScoreStatistics* units;  // [g,U], from the first unit of the chunk on
    int64_t row_units;       // U
    int count;               // pages to score
    PageTokens tokens;       // by page of the chunk
};

// Adds the runs in order, and writes scores and statistics of up to kBlockPages pages of the chunk from first_page on,
// for one tile of heads. Neighbouring threads have neighbouring pages of one head, kPagesPerThread each.
template <int kHeads>
__device__ __forceinline__ void write_scores(SharedSpan<float> partials, const GroupQuery& query, int first_head,
                                             const ScoredChunk& chunk, int first_page) {
    static_assert(kHeads * kPageLanes <= kScoreThreads && kPageLanes % kWarpSize == 0, "a warp has one head");
    const int own = static_cast<int>(threadIdx.x) / kPageLanes;
    const int head = first_head + own;
    if (own >= kHeads || head >= query.group) {
        return;
    }
    const int lane = static_cast<int>(threadIdx.x) % kPageLanes;
    const int page = first_page + lane * kPagesPerThread;
    const SharedSpan<PageTile> runs = partials.cast<PageTile>();
    PageTile sum = runs[own * kPageLanes + lane];
#pragma unroll
    for (int part = 1; part < kChannelParts; ++part) {
        const PageTile run = runs[(part * kHeads + own) * kPageLanes + lane];
#pragma unroll
        for (int k = 0; k < kPagesPerThread; ++k) {
            sum.value[k] += run.value[k];
        }
    }
    float scores[kPagesPerThread];
    float tokens[kPagesPerThread];
#pragma unroll
    for (int k = 0; k < kPagesPerThread; ++k) {
        scores[k] = minus_infinity();
        tokens[k] = chunk.tokens.of(page + k);
        if (page + k < chunk.count) {
            scores[k] = sum.value[k] / query.temperature[head];
            chunk.scores[head * chunk.row_units * kUnitPages + page + k] = scores[k];
        }
    }
    const ScoreStatistics unit = unit_statistics(scores, tokens);
    if (page % kUnitPages == 0 && page < chunk.count) {
        chunk.units[head * chunk.row_units + page / kUnitPages] = unit;
    }
}

// Scores the pages of a chunk for all heads of the group.
template <class T, int kHeads>
__device__ __forceinline__ void score_staged(const StagedBounds<T>& staged, const GroupQuery& query, int tiles,
                                             SharedSpan<float> signed_query, SharedSpan<float> partials,
                                             const ScoredChunk& chunk) {
    const SharedSpan<HeadTile<kHeads>> heads = signed_query.template cast<HeadTile<kHeads>>();
    for (int tile = 0; tile < tiles; ++tile) {
        const SharedSpan<HeadTile<kHeads>> part = heads.part(tile * query.channels, query.channels);
        for (int page = 0; page < chunk.count; page += kBlockPages) {
            add_channels<T, kHeads>(staged, part, query.channels, page, chunk.count, partials);
            __syncthreads();
            write_scores<kHeads>(partials, query, tile * kHeads, chunk, page);
            __syncthreads();
        }
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
    KVC_SHARED(int32_t, first, KVC_LARGEST_HEAD_SIZE);
    const StagedBounds<T> staged = {dynamic_shared<T>(0, query.channels * layout.row), first, layout.row};
    const SharedSpan<float> signed_query =
        dynamic_shared<float>(layout.signed_query, query.channels * layout.tiles * kHeads);
    const SharedSpan<float> partials = dynamic_shared<float>(layout.partials, kChannelParts * kHeads * kBlockPages);

    choose_channels(own, query);
    __syncthreads();
    const T* table = params.bounds + head * 2 * query.head_size * params.pages;
    stage_bounds(table, params.pages, params.row_vectors, query, task.start, task.count, staged);
    describe_channels<T, kHeads>(query, params.pages, task.start, layout.tiles, signed_query, staged);
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
    score_staged<T, kHeads>(staged, query, layout.tiles, signed_query, partials, chunk);
}

template <class T, int kHeads>
__global__ void __launch_bounds__(kScoreThreads) page_scores(const PageScoresParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    KVC_SHARED(int32_t, chosen, KVC_LARGEST_HEAD_SIZE);
    KVC_SHARED(float, temperature, KVC_LARGEST_GROUP);
    const AppendParams<T>& token = params.token;
    const int size = token.head_size, group = params.group;
    const int query_start = score_layout<T, kHeads>(params.row_vectors, params.top_r, group, size).query;
    const GroupQuery query = {
        dynamic_shared<float>(query_start, group * size), chosen, temperature, group, size, params.top_r};
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
