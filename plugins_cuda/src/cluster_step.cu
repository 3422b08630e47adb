// The launch of cluster_step: a source of its own, for it takes long to compile.
#include "src/cluster_step.h"

#include "kernels/cluster_step.cuh"
#include "src/attention.h"
#include "src/score_and_select.h"

namespace kvc {
namespace {

/// The cases in which clusters take whole steps. The limits rest on predictions: docs/kernels/decode-selection.md.
struct ClusterStepRule {
    static constexpr int32_t kVectorStep = 8;  // rows of bounds are in different banks
    static constexpr int32_t kLargestHeadSize = 128;
    static constexpr int32_t kLargestGroup = 8;

    /// True where no cluster of any size may be used.
    static bool forbids(const KvcHybridAttentionParams& p, int32_t pages) {
        const bool is_off = !is_on(Switch::kClusters) || !is_on(Switch::kClusterStep);
        return is_off || p.cache_format != 0 || p.head_size > kLargestHeadSize || group_of(p) > kLargestGroup ||
               pages > kScoreThreads * SharedKeys::kMost || p.dense_until > p.token_budget;
    }

    /// Blocks of a cluster; 0 where there is no launch. A function of sizes and device: the most blocks of 8, 4, 2 and 1
    /// of which each has a multiprocessor to itself, all at once. Completes `params` for it.
    template <class T, int kHeads, int kHeadSize, class Bound>
    static int32_t choose(const KvcHybridAttentionParams& p, int splits, ClusterStepParams<T, Bound>& params) {
        constexpr const char* kName = "cluster_step";
        const int device = platform::current_device(kName);
        const int64_t clusters = int64_t{p.batch} * p.kv_heads;
        const int64_t multiprocessors = platform::multiprocessors_of(kName, device);
        if (clusters > multiprocessors || !has_later_code<cluster_step<T, kHeads, kHeadSize, Bound>>(kName, device)) {
            return 0;
        }
        for (int32_t blocks = kClusterBlocks; blocks > 0; blocks /= 2) {
            if (clusters * blocks > multiprocessors) {
                continue;
            }
            if (!fits<T, kHeads, kHeadSize>(blocks, splits, params)) {
                return 0;  // fewer blocks need more memory
            }
            const size_t bytes = params.layout.total;
            if (blocks == 1 || clusters <= active_clusters<cluster_step<T, kHeads, kHeadSize, Bound>>(
                                               kName, device, dim3(kScoreThreads), bytes, blocks)) {
                return blocks;
            }
        }
        return 0;
    }

private:
    /// Divides the pages of the longest row among that many blocks; false where a block has no room for its part. Warps
    /// copy two tiles ahead where that fits too.
    template <class T, int kHeads, int kHeadSize, class Bound>
    static bool fits(int32_t blocks, int splits, ClusterStepParams<T, Bound>& params) {
        const int32_t vectors = pages_of_block<Bound>(params.selection.pages, blocks) / kVectorWidth<Bound>;
        const int32_t row_vectors = ceil_div(vectors, kVectorStep) * kVectorStep;
        if (row_vectors > kScoreThreads) {
            return false;
        }
        for (int stages = is_on(Switch::kRing) ? 2 : 1; stages > 0; --stages) {
            lay_out_cluster_step<T, kHeads, kHeadSize>(row_vectors, splits, stages, params);
            if (params.layout.total <= ClusterRule::kMostSharedBytes) {
                return true;
            }
        }
        return false;
    }
};

/// Calls `body` with the group rounded up to 4 or 8 and the head size rounded up to 64 or 128, as integral_constants.
template <class Body>
bool dispatch_heads(const KvcHybridAttentionParams& p, Body&& body) {
    using Four = std::integral_constant<int, 4>;
    using Eight = std::integral_constant<int, 8>;
    using Small = std::integral_constant<int, 64>;
    using Large = std::integral_constant<int, 128>;
    const bool is_small = p.head_size <= Small::value;
    if (group_of(p) <= Four::value) {
        return is_small ? body(Four{}, Small{}) : body(Four{}, Large{});
    }
    return is_small ? body(Eight{}, Small{}) : body(Eight{}, Large{});
}

template <class T, int kHeads, int kHeadSize, class Bound>
bool launch_for(const KvcHybridAttentionParams& p, const AppendParams<T>& append, int32_t pages, Stream& stream) {
    ClusterStepParams<T, Bound> params{};
    params.selection = selection_params<T, Bound>(p, append, pages);
    params.output = static_cast<T*>(p.output);
    params.scale = attention_scale(p.head_size);
    const int splits = most_splits(most_attended(limits_of(p)), true);
    const int32_t blocks = ClusterStepRule::choose<T, kHeads, kHeadSize>(p, splits, params);
    if (blocks == 0) {
        return false;
    }
    launch<cluster_step<T, kHeads, kHeadSize, Bound>>("cluster_step", grid_of(blocks, p.kv_heads, p.batch),
                                                      dim3(kScoreThreads), params.layout.total, stream, params, blocks);
    return true;
}

}  // namespace

template <class T>
bool launch_cluster_step(const KvcHybridAttentionParams& p, const AppendParams<T>& append, int32_t pages,
                         Stream& stream) {
    if (ClusterStepRule::forbids(p, pages)) {
        return false;
    }
    return dispatch_heads(p, [&](auto heads, auto head_size) {
        if (p.fp8_bounds != 0) {
            return launch_for<T, heads(), head_size(), fp8_t>(p, append, pages, stream);
        }
        return launch_for<T, heads(), head_size(), T>(p, append, pages, stream);
    });
}

template bool launch_cluster_step(const KvcHybridAttentionParams&, const AppendParams<half_t>&, int32_t, Stream&);
template bool launch_cluster_step(const KvcHybridAttentionParams&, const AppendParams<bfloat16_t>&, int32_t, Stream&);

}  // namespace kvc
