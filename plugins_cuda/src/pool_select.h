// Launches of the kernels that choose the prompt tokens to keep.
#pragma once

#include "kernels/pool_select.cuh"
#include "src/launch.h"

namespace kvc {

template <int kThreads>
void launch_pool_votes(const PoolSelectParams& params, Stream& stream) {
    const int64_t outputs = kPoolTile<kThreads> - (params.pool_kernel - 1);
    const dim3 grid = grid_of(ceil_div(params.prompt_length, outputs), params.kv_heads, params.batch);
    launch<pool_votes<kThreads>>("pool_votes", grid, dim3(kThreads), kPoolSharedBytes<kThreads>, stream, params);
}

/// Queues both kernels; the first only where a prompt can exceed the budget.
inline void launch_pool_select(const PoolSelectParams& params, Stream& stream) {
    // Small tiles spread a prompt over more blocks; for a wide kernel they would hold little but margins.
    constexpr int32_t kWideKernel = 1024;
    if (params.votes != nullptr) {
        params.pool_kernel < kWideKernel ? launch_pool_votes<256>(params, stream)
                                         : launch_pool_votes<1024>(params, stream);
    }
    const dim3 grid = grid_of(params.kv_heads, params.batch);
    launch<select_prompt<kSelectThreads>>("select_prompt", grid, dim3(kSelectThreads), 0, stream, params);
}

}  // namespace kvc
