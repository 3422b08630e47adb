// A whole decode step of a layer in one launch, on sm_90 and later: a cluster of blocks for every (row, KV head) stores
// the token, scores and selects as score_and_select.cuh does, then attends (cluster_attention.cuh). Eight blocks of a
// cluster for one or two rows, fewer for more: each block has a multiprocessor to itself.
//
// Source and semantics: those of the launches that it stands for. Results have the same bits, from the same functions.
//
//   in   the new token: query [B,H,D], key and value [B,G,D] (new_token.cuh)
//   out  k_cache, v_cache [B,G,C,D] and bounds [B,G,2D,P], of the cache's type or fp8, with the token in them;
//        output [B,H,D]; selected int32 [B,G,selected_width], or null: see select_tokens.cuh; the rotated query [B,H,D]
//        where it is rotated here
//
// Every block lists all tokens that are selected, in its own shared memory, and keeps the query there.
//
// Barriers of the cluster: that of score_and_select; of a row that reads all its entries one behind the new token. Results
// of the attention are sent asynchronously (cluster_inbox.cuh).
//
// Bytes per KV head: those of score_and_select without the list, and 2 k D s of keys and values.
//
// Determinism: a row's bits depend on the row alone, not on the number of blocks.
#pragma once

#include <cstdint>

#include "kernels/cluster_attention.cuh"
#include "kernels/score_and_select.cuh"

namespace kvc {

// Layout of the dynamic shared memory; offsets in bytes, multiples of 16. The attention's comes over the selection's:
// its results over what is free once keys are exchanged, its ring over all of it.
struct ClusterStepLayout {
    ClusterAttentionLayout attention;
    int query;  // T [g,D]
    int list;   // int32 [top_k]
    int total;
};

template <class T, class Bound>
struct ClusterStepParams {
    ScoreAndSelectParams<T, Bound> selection;  // without indices and arrivals
    T* output;                                 // [B,H,D]
    ClusterStepLayout layout;
    int32_t stages;  // see SparseAttentionParams
    float scale;     // the same
};

// Lays out a step for staged rows of so many vectors, rows of so many splits and warps that copy `stages` tiles ahead.
template <class T, int kHeads, int kHeadSize, class Bound>
void lay_out_cluster_step(int row_vectors, int splits, int stages, ClusterStepParams<T, Bound>& params) {
    ScoreAndSelectParams<T, Bound>& of = params.selection;
    const int group = of.append.group, size = of.append.head_size;
    const auto rounded = [](int bytes) { return (bytes + 15) / 16 * 16; };
    ClusterStepLayout& layout = params.layout;
    layout.attention = cluster_attention_layout<T, kHeadSize>(splits, group, size, stages);
    of.layout =
        cluster_layout<T, kHeads, Bound>(row_vectors, of.top_r, group, size, of.pages, layout.attention.results_end());
    layout.query = of.layout.total > layout.attention.ring_end ? of.layout.total : layout.attention.ring_end;
    layout.list = layout.query + rounded(group * size * static_cast<int>(sizeof(T)));
    layout.total = layout.list + rounded(static_cast<int>(of.limits.top_k * sizeof(int32_t)));
    params.stages = stages;
}

// Where a block writes the tokens that all blocks select: into its own list, and of its own pages for the caller.
template <class T, int kHeadSize>
struct WholeList {
    SharedSpan<int32_t> list;
    SharedSpan<T> query;
    int32_t* selected;  // or null
    Inbox results;
    int group;
    int head_size;

    // By one thread of the block. The first block gets the results of all.
    __device__ __forceinline__ void open_inbox(const AttendedRow& row) const {
        if (cluster_rank() == 0) {
            results.make();
            results.expect(ClusterAttention<T, kHeadSize>::result_bytes(row.count, group, head_size));
        }
    }
    __device__ __forceinline__ void keep_query(int at, const T& value) const { query[at] = value; }
    __device__ __forceinline__ void write_page(int32_t token, int32_t slot, int32_t count, bool is_own) const {
        const bool is_told = is_own && selected != nullptr;
        constexpr int32_t kTogether = 4;
#pragma unroll 1
        for (int32_t first = 0; first < count; first += kTogether) {
#pragma unroll
            for (int32_t i = first; i < first + kTogether; ++i) {
                if (i < count) {
                    list[slot + i] = token + i;
                }
            }
            if (is_told) {
                for (int32_t i = first; i < min(count, first + kTogether); ++i) {
                    selected[slot + i] = token + i;
                }
            }
        }
    }
    __device__ __forceinline__ void write_recent(const AttendedRow& row, const AttentionLimits& limits, int32_t thread,
                                                 int32_t threads) const {
        const int32_t slot = row.best(limits), token = row.compared(limits);
#pragma unroll 1
        for (int32_t i = static_cast<int32_t>(threadIdx.x); i < limits.recent; i += kScoreThreads) {
            list[slot + i] = token + i;
        }
        if (selected != nullptr) {
#pragma unroll 1
            for (int32_t i = thread; i < limits.recent; i += threads) {
                selected[slot + i] = token + i;
            }
        }
    }
};

// One KV head of a row, by its cluster.
template <class T, int kHeads, int kHeadSize, class Bound>
__device__ __forceinline__ void step_in_cluster(const ClusterStepParams<T, Bound>& params) {
    const ScoreAndSelectParams<T, Bound>& selection = params.selection;
    const AppendParams<T>& append = selection.append;
    const ClusterStepLayout& layout = params.layout;
    const int blocks = static_cast<int>(gridDim.x), outputs = append.group * append.head_size;
    const int64_t number = cluster_head(selection);
    T* const output = params.output + number * outputs;
    KVC_SHARED(uint64_t, counter, 1);
    const Inbox results = {counter};
    const WholeList<T, kHeadSize> lists = {dynamic_shared<int32_t>(layout.list, selection.limits.top_k),
                                           dynamic_shared<T>(layout.query, outputs),
                                           selected_of(selection, number),
                                           results,
                                           append.group,
                                           append.head_size};
    const SelectedRow selected = select_in_cluster<T, kHeads, Bound>(selection, blocks, lists);
    const AttendedRow& row = selected.row;
    if (row.count == 0) {
        if (cluster_rank() == 0) {
            write_zeros<kScoreThreads>(output, outputs);
        }
        return;
    }
    const int64_t cache = number * append.capacity;
    const AttendedHead<T> head = {append.keys.from(cache),
                                  append.values.from(cache),
                                  lists.list,
                                  lists.query,
                                  output,
                                  append.group,
                                  append.head_size,
                                  params.stages,
                                  params.scale};
    ClusterAttention<T, kHeadSize>{head, layout.attention, row, blocks, selected.appender, results}.attend();
}

// Grid (blocks of a cluster, G, B): 8, 4, 2 or 1. kHeads is the group rounded up to 4 or 8, kHeadSize the head size
// rounded up to 64 or 128. Empty where there are no clusters: never launched there.
template <class T, int kHeads, int kHeadSize, class Bound>
__global__ void __launch_bounds__(kScoreThreads, 1) cluster_step(const ClusterStepParams<T, Bound> params) {
    static_assert(kScoreThreads == kAttentionThreads, "a block first scores, then attends");
    start_next_launch();
    wait_for_previous_launch();
    if constexpr (platform::kHasClusters) {
        step_in_cluster<T, kHeads, kHeadSize>(params);
    }
}

}  // namespace kvc
