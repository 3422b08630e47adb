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
// and whole vectors of bounds, so no vector is of two blocks: the block of the page that the token joins stages the page's
// bounds as the token makes them, and writes them to memory; no other block reads them. It also writes key and value; the
// first block writes the query where it is rotated here. Scores, statistics and keys never leave the multiprocessors.
//
// Barriers of the cluster: one for "every block has begun", waited for after the scores. Bounds are copied in bulk,
// statistics and keys are sent asynchronously: a block waits for all that it gets (cluster_inbox.cuh).
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
#include "kernels/dependent_launch.cuh"
#include "kernels/divisor.cuh"
#include "kernels/page_scores.cuh"
#include "kernels/page_shares.cuh"
#include "kernels/prepared_query.cuh"
#include "kernels/select_tokens.cuh"
#include "kernels/staged_bounds.cuh"

namespace kvc {

// Pages of a thread, neighbours, that it ranks at a time: a vector of keys.
constexpr int kClusterPages = 4;

// What the blocks of a cluster send each other while they select, and what each copies for itself: bounds, in parts, so that
// the first channels are scored while the others' are on their way.
struct SelectionInboxes {
    static constexpr int kBoundParts = 4;
    static constexpr int kCount = 2 + kBoundParts;
    SharedSpan<uint64_t> counters;  // [kCount]
    int part_rows;                  // staged rows of a part

    __device__ __forceinline__ Inbox units() const { return {counters.part(0, 1)}; }
    __device__ __forceinline__ Inbox keys() const { return {counters.part(1, 1)}; }
    __device__ __forceinline__ Inbox bounds(int part) const { return {counters.part(2 + part, 1)}; }

    // That of the part that a row is in, found without a division.
    __device__ __forceinline__ Inbox bounds_of_row(int row) const {
        static_assert(kBoundParts == 4);
        return bounds((row >= part_rows) + (row >= 2 * part_rows) + (row >= 3 * part_rows));
    }

    // By the first kCount threads of the block, each for the inbox of its number, of a row of so many pages; of every
    // channel so many bytes of bounds are copied.
    __device__ __forceinline__ void open(int number, int pages, int group, int channels, uint32_t row_bytes) const {
        const auto vectors = static_cast<uint32_t>(pages + kClusterPages - 1) / kClusterPages;
        const auto rows = static_cast<uint32_t>(min(max(channels - (number - 2) * part_rows, 0), part_rows));
        const Inbox own = {counters.part(number, 1)};
        own.make();
        own.expect(number == 0   ? static_cast<uint32_t>(group * units_of(pages) * int{sizeof(ScoreStatistics)})
                   : number == 1 ? vectors * static_cast<uint32_t>(sizeof(uint4))
                                 : rows * row_bytes);
    }
};

// Layout of the dynamic shared memory; offsets in bytes, multiples of 16. That of page_scores.cuh comes first. All up to
// the row's keys is free once the keys are exchanged, and all once the pages are selected.
struct ClusterLayout {
    ScoreLayout score;
    int part_rows;    // staged rows that are waited for together
    int chunk_units;  // the chunk has room for these
    int query;        // float [g,D]
    int scores;       // float [g,8 chunk_units]
    int row_keys;     // uint32_t [8U], and room behind: of all blocks
    int units;        // ScoreStatistics [g,chunk_units]: of the block
    int row_units;    // ScoreStatistics [g,U]: of all blocks
    int total;
};

// Keys of a row of so many pages, and room for what a thread reads past them; whole vectors.
__host__ __device__ __forceinline__ int row_keys_of(int pages) {
    constexpr int kRoom = (SharedKeys::kInFlight + kClusterPages - 1) / kClusterPages * kClusterPages;
    return units_of(pages) * kUnitPages + kRoom;
}

// `row_vectors`: 16-byte vectors of a staged row, enough for the pages of a block of the longest row. The keys start at byte
// `fewest` or later.
template <class T, int kHeads, class Bound>
ClusterLayout cluster_layout(int row_vectors, int channels, int group, int head_size, int pages, int fewest = 0) {
    constexpr int kStatisticsBytes = static_cast<int>(sizeof(ScoreStatistics));
    ClusterLayout layout;
    layout.score = score_layout<T, kHeads, Bound>(row_vectors, channels, group);
    constexpr int kStep = PageScorer<T, kHeads, Bound>::kStepChannels, kParts = SelectionInboxes::kBoundParts;
    layout.part_rows = (layout.score.rows / kStep + kParts - 1) / kParts * kStep;
    layout.chunk_units = row_vectors * kVectorWidth<Bound> / kUnitPages;
    layout.query = layout.score.total;
    layout.scores = layout.query + group * head_size * static_cast<int>(sizeof(float));
    const int own_end = layout.scores + group * layout.chunk_units * kUnitPages * static_cast<int>(sizeof(float));
    layout.row_keys = own_end > fewest ? own_end : fewest;
    layout.units = layout.row_keys + row_keys_of(pages) * static_cast<int>(sizeof(uint32_t));
    layout.row_units = layout.units + group * layout.chunk_units * kStatisticsBytes;
    layout.total = layout.row_units + group * units_of(pages) * kStatisticsBytes;
    return layout;
}

template <class T, class Bound>
struct ScoreAndSelectParams {
    AppendParams<T> append;  // the new token, the caches, and the rows' lengths
    Bound* bounds;           // [B,G,2D,P]
    int32_t* indices;        // [B,G,index_stride]
    int32_t* selected;       // [B,G,selected_width] or null
    AttentionLimits limits;
    int64_t index_stride;
    int64_t selected_width;
    ClusterLayout layout;
    Divisor by_page_size;
    int32_t page_size;  // p
    int32_t pages;      // P
    int32_t top_r;      // r
};

// Pages of each block, whole vectors of bounds: the `blocks` of a cluster, a power of two, share `pages` evenly.
template <class Bound>
__host__ __device__ __forceinline__ int pages_of_block(int pages, int blocks) {
    constexpr int kWidth = kVectorWidth<Bound>;
    static_assert(kWidth % kUnitPages == 0, "and whole units");
    return (((pages + kWidth - 1) / kWidth + blocks - 1) >> log2_of_blocks(blocks)) * kWidth;
}

// The parts of the bounds, which are waited for one after another, as their channels are scored.
struct BoundArrivals {
    static constexpr bool kAllStaged = false;
    const SelectionInboxes& inboxes;

    __device__ __forceinline__ int rows() const { return inboxes.part_rows; }
    __device__ __forceinline__ void wait_for(int part) const { inboxes.bounds(part).wait(); }
};

// The page that a row's new token joins, in the block that has it: the last page, hence in the last vector of its rows. That
// vector is not copied in bulk: each thread brings its channel's.
template <class T, class Bound>
class ChangedPage {
public:
    // Starts to read the bounds [2D,P] of the page, and the vectors that they are in. Not where `appends` is false.
    __device__ __forceinline__ ChangedPage(Bound* table, bool appends, int head_size, int pages, int page)
        : joined_(BoundTable<T>(table, kIsFp8<Bound>), appends ? head_size : 0, pages, page), page_(page) {
        if (joined_.exists()) {
            const Bound* const maxima =
                table + (static_cast<int>(threadIdx.x) * pages + page / kVectorWidth<Bound> * kVectorWidth<Bound>);
            maxima_ = platform::load_vector_of<uint4>(maxima);
            negated_minima_ = platform::load_vector_of<uint4>(maxima + head_size * pages);
        }
    }

    // Writes the page's bounds with a token of this key in it to memory.
    __device__ __forceinline__ ChannelBounds raise(float key) const { return joined_.raise(key); }

    // The same, and writes the vector of the row that is chosen, the `place`-th best if below `channels`, where it is staged.
    __device__ __forceinline__ void raise_staged(float key, int place, bool is_upper, int channels, int start,
                                                 const StagedBounds<Bound>& staged) const {
        if (!joined_.exists()) {
            return;
        }
        const ChannelBounds bounds = joined_.raise(key);
        if (place < channels) {
            const int at = staged.start_of(place) + page_ - start;
            staged.values.template cast<uint4>()[at / kVectorWidth<Bound>] = is_upper ? maxima_ : negated_minima_;
            staged.values[at] = from_float<Bound>(is_upper ? bounds.maximum : bounds.negated_minimum);
        }
    }

private:
    JoinedChannel<T> joined_;
    int page_;
    uint4 maxima_{};
    uint4 negated_minima_{};
};

// One KV head of a row.
template <class T, int kHeads, class Bound>
struct ClusterHead {
    using Scorer = PageScorer<T, kHeads, Bound>;

    const ScoreAndSelectParams<T, Bound>& params;
    const GroupQuery query;
    const ChunkTask task;
    const int blocks;  // of the cluster
    const SelectionInboxes inboxes;
    const SharedSpan<uint32_t> histograms;

    // Writes scores and statistics of the block's pages to shared memory. Of every row `row_bytes` are copied, and
    // change(staged) writes the vector that is not. Includes barriers of the block, and the one by which every block of the
    // cluster has begun.
    template <class Change>
    __device__ __forceinline__ void score(const Bound* table, uint32_t row_bytes, const Change& change) const {
        __syncthreads();  // the channels are chosen, and the inboxes open
        if (task.count > 0) {
            stage_bounds_in_bulk(table, params.pages, query.chosen, params.top_r, task.start, row_bytes, staged(),
                                 [&](int row) { return inboxes.bounds_of_row(row); });
        }
        announce_to_cluster();
        clear_wide_histograms<kScoreThreads>(histograms);
        if (task.count > 0) {
            write_query();
            change(staged());
            __syncthreads();  // the query is whole, and what is not copied
            const ScoreLayout& own = params.layout.score;
            const ScoredChunk chunk = {
                &scores()[0],
                &units()[0],
                params.layout.chunk_units,
                task.count,
                {task.last, static_cast<float>(task.tokens), static_cast<float>(params.page_size)},
            };
            Scorer(params.top_r, query.group, own.factors, own.scratch)
                .template score<kTiles>(staged(), {temperatures(), query.group}, chunk, BoundArrivals{inboxes});
        }
        wait_for_cluster();
        __syncthreads();  // scores and statistics are there
    }

    // Called after `score`. Every page that is selected goes to lists.write_page(token, slot, count, is_own).
    template <class Lists>
    __device__ __forceinline__ void select(const AttendedRow& row, const Lists& lists) const {
        KVC_SHARED(HeadSoftmax, heads, KVC_LARGEST_GROUP);
        KVC_SHARED(int32_t, totals, kScoreWarps);
        KVC_SHARED(FoundDigit, found, 1);
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
                                        params.page_size, weight_at, {histograms, totals, found, shares}, emit);
    }

private:
    // Tiles of a warp that are scored together: the pages of a block of a cluster of two, of rows of 3,100 tokens in
    // pages of 3.
    static constexpr int kTiles = kIsFp8<Bound> ? 3 : 5;

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
                    own[i] = units()[min(from + i, query.group - 1) * params.layout.chunk_units + unit];
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
        const ScoredPages pages = {&scores()[0], nullptr, params.layout.chunk_units, query.group, params.page_size, 0,
                                   task.count};
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

    // The query on the chosen channels.
    __device__ __forceinline__ void write_query() const {
        const ScoreLayout& own = params.layout.score;
        const int vectors = Scorer::query_vectors(params.top_r, query.group);
        Scorer::write_query(query, &dynamic_shared<uint4>(own.factors, vectors)[0]);
        find_temperatures(query, &temperatures()[0]);
    }

    __device__ __forceinline__ StagedBounds<Bound> staged() const {
        const ScoreLayout& own = params.layout.score;
        return {dynamic_shared<Bound>(0, own.rows * own.row), starts_of_rows<Bound>(), own.row, own.rows};
    }
    __device__ __forceinline__ SharedSpan<float> temperatures() const {
        return dynamic_shared<float>(params.layout.score.query, query.group);
    }
    __device__ __forceinline__ SharedSpan<float> scores() const {
        return dynamic_shared<float>(params.layout.scores, query.group * params.layout.chunk_units * kUnitPages);
    }
    __device__ __forceinline__ SharedSpan<ScoreStatistics> units() const {
        return dynamic_shared<ScoreStatistics>(params.layout.units, query.group * params.layout.chunk_units);
    }
    __device__ __forceinline__ SharedSpan<uint32_t> row_keys() const {
        return dynamic_shared<uint32_t>(params.layout.row_keys, row_keys_of(params.pages));
    }
    __device__ __forceinline__ SharedSpan<ScoreStatistics> row_units() const {
        return dynamic_shared<ScoreStatistics>(params.layout.row_units, query.group * units_of(params.pages));
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

// A group has kHeads heads at most.
template <class T, int kHeads>
using QueryReader = GroupQueryReader<T, kHeads, true>;

// Stores the token and selects, in a row that takes part in the step; returns the rank of the block that stores the token.
// All blocks of a cluster take the same branch: the choice to select pages depends on the row alone.
template <class T, int kHeads, class Bound, class Lists>
__device__ __forceinline__ int select_row(const ScoreAndSelectParams<T, Bound>& params, int blocks,
                                          const GroupQuery& query, QueryReader<T, kHeads>& reader,
                                          const TokenChannel<T>& entry, int64_t slot, const AttendedRow& row,
                                          const Lists& lists) {
    const AppendParams<T>& append = params.append;
    const int size = append.head_size;
    const int64_t head = cluster_head(params);
    KVC_SHARED(uint32_t, histograms, kWideWords);
    KVC_SHARED(uint64_t, counters, SelectionInboxes::kCount);
    const SelectionInboxes inboxes = {counters, params.layout.part_rows};
    Bound* table = params.bounds + head * 2 * size * params.pages;
    const int page = params.by_page_size.quotient(row.length - 1), chunk = pages_of_block<Bound>(page + 1, blocks);
    // The blocks that begin at or ahead of the page, less one: a lane compares for each.
    const int lane = lane_index();
    const int appender = __popc(__ballot_sync(kFullWarp, lane > 0 && lane < blocks && page >= lane * chunk));
    const bool appends = cluster_rank() == appender;
    const ChunkTask task = chunk_task(row, page, params.page_size, chunk);
    const ChangedPage<T, Bound> changed(table, appends, size, params.pages, page);
    const int vectors = (task.count + kVectorWidth<Bound> - 1) / kVectorWidth<Bound>;
    const int copied = max(vectors - (appends ? 1 : 0), 0);  // of a row
    const uint32_t row_bytes = static_cast<uint32_t>(copied) * static_cast<uint32_t>(sizeof(uint4));
    if (const int thread = static_cast<int>(threadIdx.x); thread <= SelectionInboxes::kCount) {
        if (thread == SelectionInboxes::kCount) {
            lists.open_inbox(row);
        } else if (!row.all) {
            inboxes.open(thread, page + 1, append.group, params.top_r, row_bytes);
        }
        fence_inboxes();
    }
    T* const rotated = cluster_rank() == 0 ? append.rotated_of(head) : nullptr;
    const QueryChannel own = reader.finish(rotated, [&](int at, const T& value) { lists.keep_query(at, value); });
    const int place = row.all ? params.top_r : choose_channels(own, query);
    float key = 0.0f;
    if (appends) {
        const int64_t cache = head * append.capacity;
        key = store_token<false>(entry, append.keys.from(cache), append.values.from(cache), slot, size);
    }
    if (row.all) {
        changed.raise(key);
    } else {
        const ClusterHead<T, kHeads, Bound> own_head = {params, query, task, blocks, inboxes, histograms};
        own_head.score(table, row_bytes, [&](const StagedBounds<Bound>& staged) {
            changed.raise_staged(key, place, own.row < size, params.top_r, task.start, staged);
        });
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
__device__ __forceinline__ SelectedRow select_in_cluster(const ScoreAndSelectParams<T, Bound>& params, int blocks,
                                                         const Lists& lists) {
    KVC_SHARED(int32_t, chosen, KVC_LARGEST_HEAD_SIZE);
    const AppendParams<T>& append = params.append;
    const int size = append.head_size, group = append.group, kv_head = static_cast<int>(blockIdx.y);
    const GroupQuery query = {dynamic_shared<float>(params.layout.query, group * size), chosen, group, size,
                              params.top_r};
    const int64_t row_number = blockIdx.z, head = cluster_head(params);
    const int64_t slot = append.cache_lengths[row_number];
    const HeadChannel<T> channel(append.token, row_number, size);
    const TokenChannel<T> entry = append.entry_of(channel, row_number, kv_head);
    const T* const heads = append.query_of(row_number, kv_head);
    QueryReader<T, kHeads> reader(channel, heads, query);
    const AttendedRow row = attended_row(slot, params.limits);
    int appender = 0;
    if (row.length > 0) {
        appender = select_row<T, kHeads, Bound>(params, blocks, query, reader, entry, slot, row, lists);
    } else if (T* const rotated = append.rotated_of(head); rotated != nullptr && cluster_rank() == 0) {
        rotate_heads(channel, heads, rotated, group, size);
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
        const OwnTokens tokens = {{params.indices + head * params.index_stride, selected_of(params, head)}};
        select_in_cluster<T, kHeads, Bound>(params, kClusterBlocks, tokens);
    }
}

}  // namespace kvc
