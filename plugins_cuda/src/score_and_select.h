// One launch that replaces the first three of a hybrid step where few rows leave most of a GPU idle.
#pragma once

#include "kernels/score_and_select.cuh"
#include "src/attention.h"
#include "src/launch.h"

namespace kvc {

/// The cases in which clusters score and select. The limits rest on predictions: docs/kernels/decode-selection.md.
struct ClusterRule {
    static constexpr int32_t kLongestRow = 64;  // vectors of a staged row
    static constexpr int32_t kShortestRow = 16;
    static constexpr int kMostSharedBytes = 198 * 1024;  // dynamic; 27.5 KiB are static

    bool allows;
    ClusterLayout layout;

    /// A function of sizes and device. Pages of a block fit in a staged row; a block has a multiprocessor of its own,
    /// and all clusters run at once: a second round would take as long as the first.
    template <class T, int kHeads, class Bound>
    static ClusterRule of(const KvcHybridAttentionParams& p, int32_t pages) {
        constexpr const char* kName = "score_and_select";
        static_assert(kLongestRow * kVectorWidth<Bound> <= kScoreThreads * kClusterPages, "a thread ranks each page");
        static_assert(kLongestRow * kVectorWidth<Bound> * kClusterBlocks <= kScoreThreads * SharedKeys::kMost);
        const int32_t vectors = pages_of_block<Bound>(pages, kClusterBlocks) / kVectorWidth<Bound>;
        int32_t row = kShortestRow;
        while (row < vectors) {
            row *= 2;
        }
        if (row > kLongestRow || !is_on(Switch::kClusters)) {
            return {};
        }
        const ClusterLayout layout = cluster_layout<T, kHeads, Bound>(row, p.top_r, group_of(p), p.head_size, pages);
        const size_t bytes = layout.total;
        const int device = platform::current_device(kName);
        const int64_t clusters = int64_t{p.batch} * p.kv_heads;
        if (bytes > kMostSharedBytes || clusters * kClusterBlocks > platform::multiprocessors_of(kName, device) ||
            !has_later_code<score_and_select<T, kHeads, Bound>>(kName, device)) {
            return {};
        }
        const int64_t most = active_clusters<score_and_select<T, kHeads, Bound>>(kName, device, dim3(kScoreThreads),
                                                                                 bytes, kClusterBlocks);
        return {clusters <= most, layout};
    }
};

/// What a cluster needs to select; without the list of tokens, and the division of pages among its blocks.
template <class T, class Bound>
ScoreAndSelectParams<T, Bound> selection_params(const KvcHybridAttentionParams& p, const AppendParams<T>& append,
                                                int32_t pages) {
    ScoreAndSelectParams<T, Bound> params{};
    params.append = append;
    params.bounds = static_cast<Bound*>(p.bounds);
    params.selected = p.selected;
    params.limits = limits_of(p);
    params.index_stride = list_stride(p.top_k);
    params.selected_width = p.selected_width;
    params.by_page_size = Divisor::of(p.page_size);
    params.page_size = p.page_size;
    params.pages = pages;
    params.top_r = p.top_r;
    return params;
}

/// Queues the launch and returns true; returns false, and queues nothing, where the rule forbids it.
template <class T, int kHeads, class Bound>
bool launch_score_and_select(const KvcHybridAttentionParams& p, const AppendParams<T>& append, int32_t pages,
                             int32_t* indices, Stream& stream) {
    const ClusterRule rule = ClusterRule::of<T, kHeads, Bound>(p, pages);
    if (!rule.allows) {
        return false;
    }
    ScoreAndSelectParams<T, Bound> params = selection_params<T, Bound>(p, append, pages);
    params.indices = indices;
    params.layout = rule.layout;
    launch<score_and_select<T, kHeads, Bound>>("score_and_select", grid_of(kClusterBlocks, p.kv_heads, p.batch),
                                               dim3(kScoreThreads), rule.layout.total, stream, params, kClusterBlocks);
    return true;
}

}  // namespace kvc
