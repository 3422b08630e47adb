// prepare_step.cuh, page_scores.cuh and select_tokens.cuh in one launch, for few rows on sm_90 and later: a cluster of
// blocks for every (row, KV head). Each scores its share of the row's pages; they exchange statistics and order keys. Then
// every block selects among all pages, and names the tokens that are selected from its own.
//
// Source and semantics: those of the three kernels. Results have the same bits, from the same functions.
//
//   in   the new token: query [B,H,D], key and value [B,G,D] (new_token.cuh)
//   out  k_cache, v_cache [B,G,C,D] and bounds [B,G,2D,P], of the cache's type or fp8, with the token in them;
//        arrivals [B,G] = 0;
//        indices int32 [B,G,index_stride] and selected int32 [B,G,selected_width], or null: see select_tokens.cuh;
//        the rotated query [B,H,D] where it is rotated here
//
// Grid (kClusterBlocks, G, B). Every block chooses the channels for itself. A block has neighbouring pages, whole units
// and whole vectors of bounds, so no vector is of two blocks: the block of the page that the token joins writes the page's
// bounds in memory, then stages them; no other block reads them. It also writes key and value; the first block writes the
// query where it is rotated here. Scores, statistics and keys never leave the multiprocessors.
//
// Barriers of the cluster: one for "every block has begun", waited for after the scores. Statistics and keys are sent
// asynchronously: a block waits for all that it gets (cluster_inbox.cuh).
//
// Bytes per KV head: r P b of bounds (b bytes each), 2D sectors of 32 bytes of bounds, 4 D s for the token, 4 top_k
// written, and g D s of query for every block.
//
// Determinism: a row's bits depend on the row alone: its own length divides its pages, and no bit depends on how.
#pragma once

#include <cstdint>

#include "kernels/append.cuh"
#include "kernels/attended_row.cuh"
#include "kernels/bound_table.cuh"
#include "kernels/cluster.cuh"
#include "kernels/cluster_inbox.cuh"
#include "kernels/cluster_select.cuh"
#include "kernels/copy_async.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/page_scores.cuh"
#include "kernels/page_shares.cuh"
#include "kernels/prepared_query.cuh"
#include "kernels/select_tokens.cuh"
#include "kernels/staged_bounds.cuh"

namespace kvc {

template <class T, class Bound>
struct ScoreAndSelectParams {
    AppendParams<T> append;  // the new token, the caches, and the rows' lengths
    Bound* bounds;           // [B,G,2D,P]
    int32_t* indices;        // [B,G,index_stride]
    int32_t* selected;       // [B,G,selected_width] or null
    AttentionLimits limits;
    int64_t index_stride;
    int64_t selected_width;
    int32_t page_size;    // p
    int32_t pages;        // P
    int32_t top_r;        // r
    int32_t row_vectors;  // 16-byte vectors of a staged row: enough for the pages of a block of the longest row
};

// Pages of a thread, neighbours, that it ranks at a time: a vector of keys.
constexpr int kClusterPages = 4;

// Layout of the dynamic shared memory; offsets in bytes, multiples of 16. That of page_scores.cuh comes first. All up to
// the row's keys is free once the keys are exchanged, and all once the pages are selected.
struct ClusterLayout {
    ScoreLayout score;
    int chunk_units;  // the chunk has room for these
    int query;        // float [g,D]
    int scores;       // float [g,8 chunk_units]
    int row_keys;     // uint32_t [8U]: of all blocks
    int units;        // ScoreStatistics [g,chunk_units]: of the block
    int row_units;    // ScoreStatistics [g,U]: of all blocks
    int total;
};

// The keys start at byte `fewest` or later.
template <class T, int kHeads, class Bound>
__host__ __device__ __forceinline__ ClusterLayout cluster_layout(int row_vectors, int channels, int group,
                                                                 int head_size, int pages, int fewest = 0) {
    constexpr int kStatisticsBytes = static_cast<int>(sizeof(ScoreStatistics));
    ClusterLayout layout;
    layout.score = score_layout<T, kHeads, Bound>(row_vectors, channels, group);
    layout.chunk_units = row_vectors * kVectorWidth<Bound> / kUnitPages;
    layout.query = layout.score.total;
    layout.scores = layout.query + group * head_size * static_cast<int>(sizeof(float));
    const int own_end = layout.scores + group * layout.chunk_units * kUnitPages * static_cast<int>(sizeof(float));
    layout.row_keys = own_end > fewest ? own_end : fewest;
    layout.units = layout.row_keys + units_of(pages) * kUnitPages * static_cast<int>(sizeof(uint32_t));
    layout.row_units = layout.units + group * layout.chunk_units * kStatisticsBytes;
    layout.total = layout.row_units + group * units_of(pages) * kStatisticsBytes;
    return layout;
}

// Pages of each block, whole vectors of bounds: the `blocks` of a cluster, a power of two, share `pages` evenly.
template <class Bound>
__host__ __device__ __forceinline__ int pages_of_block(int pages, int blocks) {
    constexpr int kWidth = kVectorWidth<Bound>;
    static_assert(kWidth % kUnitPages == 0, "and whole units");
    return (((pages + kWidth - 1) / kWidth + blocks - 1) >> log2_of_blocks(blocks)) * kWidth;
}

// What the blocks of a cluster send each other while they select.
struct SelectionInboxes {
    static constexpr int kCount = 2;
    SharedSpan<uint64_t> counters;  // [kCount]

    __device__ __forceinline__ Inbox units() const { return {counters.part(0, 1)}; }
    __device__ __forceinline__ Inbox keys() const { return {counters.part(1, 1)}; }

    // By one thread of the block, of a row of so many pages.
    __device__ __forceinline__ void open(int pages, int group) const {
        const int vectors = (pages + kClusterPages - 1) / kClusterPages;
        units().make();
        units().expect(static_cast<uint32_t>(group * units_of(pages)) * static_cast<uint32_t>(sizeof(ScoreStatistics)));
        keys().make();
        keys().expect(static_cast<uint32_t>(vectors) * static_cast<uint32_t>(sizeof(uint4)));
    }
};

// One KV head of a row.
template <class T, int kHeads, class Bound>
struct ClusterHead {
    using Scorer = PageScorer<T, kHeads, Bound>;

    const ScoreAndSelectParams<T, Bound>& params;
    const ClusterLayout layout;
    const GroupQuery query;
    const ChunkTask task;
    const int blocks;  // of the cluster
    const SelectionInboxes inboxes;
    const SharedSpan<uint32_t> histograms;

    // Writes scores and statistics of the block's pages to shared memory. Includes a barrier of the block, and the one
    // by which every block of the cluster has begun.
    __device__ __forceinline__ void score(const Bound* table) const {
        __syncthreads();  // the channels are chosen, and the page's bounds written
        if (task.count > 0) {
            stage(table);
        }
        announce_to_cluster();
        if (task.count > 0) {
            write_query();
            const ScoreLayout& own = layout.score;
            const ScoredChunk chunk = {
                &scores()[0],
                &units()[0],
                layout.chunk_units,
                task.count,
                {task.last, static_cast<float>(task.tokens), static_cast<float>(params.page_size)},
            };
            Scorer(params.top_r, query.group, own.factors, own.scratch)
                .template score<2>(staged(), {temperatures(), query.group}, chunk);
        }
        clear_wide_histograms<kScoreThreads>(histograms);
        wait_for_cluster();
        __syncthreads();
    }

    // Called after `score`. Every page that is selected goes to lists.write_page(token, slot, count, is_own).
    template <class Lists>
    __device__ __forceinline__ void select(const AttendedRow& row, const Lists& lists) const {
        KVC_SHARED(HeadSoftmax, heads, KVC_LARGEST_GROUP);
        KVC_SHARED(uint32_t, sums, kRadixBins);
        KVC_SHARED(int32_t, shares, kEmissionWords<kScoreThreads>);
        constexpr int kHeldUnits = 2;
        send_units();
        const int last = task.start + task.last;
        inboxes.units().wait();
        head_softmax<kScoreThreads, kHeldUnits, kTokenWarps>(&row_units()[0], units_of(params.pages),
                                                             units_of(last + 1), query.group, heads);
        send_keys(heads);
        inboxes.keys().wait();
        const ScoredPages all = {nullptr, nullptr, 0, 0, params.page_size, row.compared(params.limits), last + 1};
        const auto weight_at = [&](int32_t page) { return all.weight(page); };
        const auto emit = [&](int32_t page, int32_t slot, int32_t count) {
            const bool is_own = page >= task.start && page < task.start + task.count;
            lists.write_page(page * params.page_size, slot, count, is_own);
        };
        select_among_all<kScoreThreads>(shared_keys<kScoreThreads>(row_keys(), last + 1), row.best(params.limits),
                                        params.page_size, weight_at, {histograms, sums, shares}, emit);
    }

private:
    // The statistics of the block's units, for every block: warp w writes to block w, of fewer blocks with other warps.
    __device__ __forceinline__ void send_units() const {
        static_assert(kScoreWarps == kClusterBlocks, "every block has a warp");
        const int64_t stride = units_of(params.pages);
        const int shift = log2_of_blocks(blocks);
        const auto to = inboxes.units().outgoing(row_units(), warp_index() & (blocks - 1));
        const int count = units_of(task.count), first = (warp_index() >> shift) * kWarpSize + lane_index();
        constexpr int kTogether = 4;
#pragma unroll 1
        for (int unit = first; unit < count; unit += kScoreThreads >> shift) {
#pragma unroll 1
            for (int from = 0; from < query.group; from += kTogether) {
                ScoreStatistics own[kTogether];
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    own[i] = units()[min(from + i, query.group - 1) * layout.chunk_units + unit];
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    if (from + i < query.group) {
                        to[(from + i) * stride + task.start / kUnitPages + unit] = own[i];
                    }
                }
            }
        }
    }

    // The order keys of the block's pages, for every block; a thread ranks kClusterPages neighbours at a time.
    __device__ __forceinline__ void send_keys(SharedSpan<HeadSoftmax> heads) const {
        const ScoredPages pages = {&scores()[0],     nullptr, layout.chunk_units, query.group,
                                   params.page_size, 0,       task.count};
#pragma unroll 1
        for (int first = static_cast<int>(threadIdx.x) * kClusterPages; first < task.count;
             first += kScoreThreads * kClusterPages) {
            ScoreTile<kClusterPages> tile;
            uint32_t keys[kClusterPages];
            tile.read(pages, first, 0);
            rank_pages(pages, heads, first, tile, keys);
            const int vector = (task.start + first) / kClusterPages;
#pragma unroll
            for (int rank = 0; rank < kClusterBlocks; ++rank) {
                if (rank < blocks) {
                    inboxes.keys().outgoing(row_keys(), rank).template cast<uint4>()[vector] =
                        uint4{keys[0], keys[1], keys[2], keys[3]};
                }
            }
        }
    }

    // Starts to copy the bounds of the block's pages.
    __device__ __forceinline__ void stage(const Bound* table) const {
        stage_bounds_by_warps(table, params.pages, query.chosen, params.top_r, task.start, task.count, staged());
        copy_async_commit();
    }

    // The query on the chosen channels; a barrier behind it and the bounds.
    __device__ __forceinline__ void write_query() const {
        const ScoreLayout& own = layout.score;
        const int vectors = Scorer::query_vectors(params.top_r, query.group);
        Scorer::write_query(query, &dynamic_shared<uint4>(own.factors, vectors)[0]);
        find_temperatures(query, &temperatures()[0]);
        copy_async_wait<0>();
        __syncthreads();
    }

    __device__ __forceinline__ StagedBounds<Bound> staged() const {
        const ScoreLayout& own = layout.score;
        return {dynamic_shared<Bound>(0, own.rows * own.row), starts_of_rows<Bound>(), own.row, own.rows};
    }
    __device__ __forceinline__ SharedSpan<float> temperatures() const {
        return dynamic_shared<float>(layout.score.query, query.group);
    }
    __device__ __forceinline__ SharedSpan<float> scores() const {
        return dynamic_shared<float>(layout.scores, query.group * layout.chunk_units * kUnitPages);
    }
    __device__ __forceinline__ SharedSpan<ScoreStatistics> units() const {
        return dynamic_shared<ScoreStatistics>(layout.units, query.group * layout.chunk_units);
    }
    __device__ __forceinline__ SharedSpan<uint32_t> row_keys() const {
        return dynamic_shared<uint32_t>(layout.row_keys, units_of(params.pages) * kUnitPages);
    }
    __device__ __forceinline__ SharedSpan<ScoreStatistics> row_units() const {
        return dynamic_shared<ScoreStatistics>(layout.row_units, query.group * units_of(params.pages));
    }
};

// Where the blocks of a cluster write the tokens that they select: each its own pages' tokens, for the launch that attends.
struct OwnTokens {
    TokenLists lists;

    __device__ __forceinline__ void open_inbox(const AttendedRow&) const {}

    template <class T>
    __device__ __forceinline__ void keep_query(int, const T&) const {}
    __device__ __forceinline__ void write_page(int32_t token, int32_t slot, int32_t count, bool is_own) const {
        if (is_own) {
#pragma unroll 1
            for (int32_t i = 0; i < count; ++i) {
                lists.write(token + i, slot + i);
            }
        }
    }
    __device__ __forceinline__ void write_recent(const AttendedRow& row, const AttentionLimits& limits, int32_t thread,
                                                 int32_t threads) const {
        lists.write_recent(row, limits, thread, threads);
    }
};

// The index of this cluster's row and KV head into [B,G].
template <class T, class Bound>
__device__ __forceinline__ int64_t cluster_head(const ScoreAndSelectParams<T, Bound>& params) {
    return int64_t{blockIdx.z} * params.append.kv_heads + blockIdx.y;
}

// Its part of `selected`, or null.
template <class T, class Bound>
__device__ __forceinline__ int32_t* selected_of(const ScoreAndSelectParams<T, Bound>& params, int64_t head) {
    return params.selected == nullptr ? nullptr : params.selected + head * params.selected_width;
}

// Stores the token and selects, in a row that takes part in the step; returns the rank of the block that stores the token.
// All blocks of a cluster take the same branch: the choice to select pages depends on the row alone.
template <class T, int kHeads, class Bound, class Lists>
__device__ __forceinline__ int select_row(const ScoreAndSelectParams<T, Bound>& params, const ClusterLayout& layout,
                                          int blocks, const GroupQuery& query, const QueryChannel& own,
                                          const TokenChannel<T>& entry, int64_t slot, const AttendedRow& row,
                                          const Lists& lists) {
    const AppendParams<T>& append = params.append;
    const int size = append.head_size;
    const int64_t head = cluster_head(params);
    KVC_SHARED(uint32_t, histograms, kWideWords);
    KVC_SHARED(uint64_t, counters, SelectionInboxes::kCount);
    const SelectionInboxes inboxes = {counters};
    Bound* table = params.bounds + head * 2 * size * params.pages;
    const int page = (row.length - 1) / params.page_size, chunk = pages_of_block<Bound>(page + 1, blocks);
    int appender = 0;  // without a division
#pragma unroll
    for (int rank = 1; rank < kClusterBlocks; ++rank) {
        appender += page >= rank * chunk ? 1 : 0;
    }
    const bool appends = cluster_rank() == appender;
    const JoinedChannel<T> joined(BoundTable<T>(table, kIsFp8<Bound>), appends ? size : 0, params.pages, page);
    if (threadIdx.x == 0) {
        if (!row.all) {
            inboxes.open(page + 1, append.group);
        }
        lists.open_inbox(row);
        fence_inboxes();
    }
    if (!row.all) {
        choose_channels(own, query);
    }
    if (appends) {  // elsewhere `joined` is no channel
        const int64_t cache = head * append.capacity;
        joined.raise(store_token<false>(entry, append.keys.from(cache), append.values.from(cache), slot, size));
    }
    if (!row.all) {
        const ChunkTask task = chunk_task(row, page, params.page_size, chunk);
        const ClusterHead<T, kHeads, Bound> own_head = {params, layout, query, task, blocks, inboxes, histograms};
        own_head.score(table);
        own_head.select(row, lists);
    }
    return appender;
}

// What a row reads, and the rank of the block that has stored its new token.
struct SelectedRow {
    AttendedRow row;
    int appender;
};

// One KV head of a row, by its cluster of `blocks`, up to the lists.
template <class T, int kHeads, class Bound, class Lists>
__device__ __forceinline__ SelectedRow select_in_cluster(const ScoreAndSelectParams<T, Bound>& params,
                                                         const ClusterLayout& layout, int blocks, const Lists& lists) {
    KVC_SHARED(int32_t, chosen, KVC_LARGEST_HEAD_SIZE);
    const AppendParams<T>& append = params.append;
    const int size = append.head_size, group = append.group, kv_head = static_cast<int>(blockIdx.y);
    const GroupQuery query = {dynamic_shared<float>(layout.query, group * size), chosen, group, size, params.top_r};
    const int64_t row_number = blockIdx.z, head = cluster_head(params);
    const int64_t slot = append.cache_lengths[row_number];
    const HeadChannel<T> channel(append.token, row_number, size);
    const TokenChannel<T> entry = append.entry_of(channel, row_number, kv_head);
    T* const rotated = cluster_rank() == 0 ? append.rotated_of(head) : nullptr;
    const QueryChannel own = read_query(channel, append.query_of(row_number, kv_head), rotated, query,
                                        [&](int at, const T& value) { lists.keep_query(at, value); });
    const AttendedRow row = attended_row(slot, params.limits);
    int appender = 0;
    if (row.length > 0) {
        appender = select_row<T, kHeads, Bound>(params, layout, blocks, query, own, entry, slot, row, lists);
    }
    const int threads = blocks * kScoreThreads;
    const int thread = cluster_rank() * kScoreThreads + static_cast<int>(threadIdx.x);
    if (!row.all) {
        lists.write_recent(row, params.limits, thread, threads);
    }
    if (int32_t* const selected = selected_of(params, head); selected != nullptr) {  // the slots past the selected ones
        fill_selected(selected, row.all ? 0 : row.count, row.count, params.selected_width, thread, threads);
    }
    return {row, appender};
}

// Grid (kClusterBlocks, G, B) in clusters of kClusterBlocks. Empty where there are no clusters: never launched there.
template <class T, int kHeads, class Bound>
__global__ void __launch_bounds__(kScoreThreads) score_and_select(const ScoreAndSelectParams<T, Bound> params) {
    start_next_launch();
    wait_for_previous_launch();
    if constexpr (platform::kHasClusters) {
        const AppendParams<T>& append = params.append;
        const int64_t head = cluster_head(params);
        if (cluster_rank() == 0 && threadIdx.x == 0) {
            append.arrivals[head] = 0;
        }
        const ClusterLayout layout = cluster_layout<T, kHeads, Bound>(params.row_vectors, params.top_r, append.group,
                                                                      append.head_size, params.pages);
        const OwnTokens tokens = {{params.indices + head * params.index_stride, selected_of(params, head)}};
        select_in_cluster<T, kHeads, Bound>(params, layout, kClusterBlocks, tokens);
    }
}

}  // namespace kvc
