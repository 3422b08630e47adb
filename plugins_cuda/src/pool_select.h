// Launches of the kernels that choose the prompt tokens to keep.
#pragma once

#include "kernels/cluster_select_prompt.cuh"
#include "kernels/pool_select.cuh"
#include "src/launch.h"

namespace kvc {

template <int kThreads>
void launch_pool_votes(const PoolSelectParams& params, Stream& stream) {
    const int64_t outputs = kPoolTile<kThreads> - (params.pool_kernel - 1);
    const dim3 grid = grid_of(ceil_div(params.prompt_length, outputs), params.kv_heads, params.batch);
    launch<pool_votes<kThreads>>("pool_votes", grid, dim3(kThreads), kPoolSharedBytes<kThreads>, stream, params);
}

/// Queues the pooling, where a prompt can exceed the budget.
inline void launch_pooling(const PoolSelectParams& params, Stream& stream) {
    // Small tiles spread a prompt over more blocks; for a wide kernel they would hold little but margins.
    constexpr int32_t kWideKernel = 1024;
    if (params.votes != nullptr) {
        params.pool_kernel < kWideKernel ? launch_pool_votes<256>(params, stream)
                                         : launch_pool_votes<1024>(params, stream);
    }
}

/// Queues the selection by clusters and returns true; returns false, and queues nothing, where the device has none.
template <int kThreads, int kKeys>
bool launch_select_in_cluster(const PoolSelectParams& params, Stream& stream) {
    constexpr const char* kName = "select_prompt_in_cluster";
    constexpr size_t kBytes = PromptExchange<kThreads>::kBytes;
    const int device = platform::current_device(kName);
    if (!has_later_code<select_prompt_in_cluster<kThreads, kKeys>>(kName, device) ||
        active_clusters<select_prompt_in_cluster<kThreads, kKeys>>(kName, device, dim3(kThreads), kBytes,
                                                                   kClusterBlocks) == 0) {
        return false;
    }
    launch<select_prompt_in_cluster<kThreads, kKeys>>("select_prompt_in_cluster",
                                                      grid_of(kClusterBlocks, params.kv_heads, params.batch),
                                                      dim3(kThreads), kBytes, stream, params, kClusterBlocks);
    return true;
}

/// Where a prompt can exceed the budget, and threads have registers for its keys. docs/kernels/compact.md has predictions.
inline bool launch_select_in_clusters(const PoolSelectParams& params, Stream& stream) {
    const int64_t tokens = params.prompt_length;
    if (params.votes == nullptr || !is_on(Switch::kClusters)) {
        return false;
    }
    const auto fit = [&](int64_t threads, int64_t keys) { return tokens <= kClusterBlocks * threads * keys; };
    if (fit(256, 16)) {
        return launch_select_in_cluster<256, 16>(params, stream);
    }
    if (fit(256, 32)) {
        return launch_select_in_cluster<256, 32>(params, stream);
    }
    return fit(512, 32) && launch_select_in_cluster<512, 32>(params, stream);
}

/// Queues pooling and selection.
inline void launch_pool_select(const PoolSelectParams& params, Stream& stream) {
    launch_pooling(params, stream);
    if (!launch_select_in_clusters(params, stream)) {
        const dim3 grid = grid_of(params.kv_heads, params.batch);
        launch<select_prompt<kSelectThreads>>("select_prompt", grid, dim3(kSelectThreads), 0, stream, params);
    }
}

}  // namespace kvc
