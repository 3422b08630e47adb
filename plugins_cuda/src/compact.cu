// kvc_compact: observation scores, pooling and selection, then the caches and their bounds.
#include <algorithm>
#include <cstddef>

#include "kernels/gather_cache.cuh"
#include "kernels/observation_scores.cuh"
#include "kernels/pool_select.cuh"
#include "kvc/compact.h"
#include "src/launch.h"
#include "src/validate.h"

namespace kvc {
namespace {

/// Scratch memory of one call; empty where no prompt of the batch can exceed the budget.
struct CompactScratch {
    void* observation;
    float* votes;    // [B,G,S]
    uint32_t* keys;  // [B,G,S]
};

bool may_evict(const KvcCompactParams& params) { return params.prompt_length > params.prompt_budget; }

CompactScratch lay_out(const KvcCompactParams& params, Workspace& workspace) {
    if (!may_evict(params)) {
        return {};
    }
    const auto observation_bytes = static_cast<int64_t>(observation_workspace(params));
    const auto per_token = {int64_t{params.batch}, int64_t{params.kv_heads}, params.prompt_length};
    return {workspace.take<std::byte>({observation_bytes}), workspace.take<float>(per_token),
            workspace.take<uint32_t>(per_token)};
}

uint64_t workspace_bytes(const KvcCompactParams& params) {
    Workspace measure;
    lay_out(params, measure);
    return measure.used();
}

template <int kThreads>
void launch_pooling(const KvcCompactParams& params, const PoolSelectParams& pool, cudaStream_t stream) {
    const int64_t outputs = kPoolTile<kThreads> - (params.pool_kernel - 1);
    const auto tiles = static_cast<unsigned>(ceil_div(params.prompt_length, outputs));
    const dim3 grid(tiles, params.kv_heads, params.batch);
    launch("pool_votes", pool_votes<kThreads>, grid, dim3(kThreads), kPoolSharedBytes<kThreads>, stream, pool);
}

void launch_selection(const KvcCompactParams& params, const CompactScratch& scratch, cudaStream_t stream) {
    const PoolSelectParams pool = {params.kv_heads,      params.window,        params.pool_kernel, params.prompt_length,
                                   params.prompt_budget, params.capacity,      scratch.votes,      params.prompt_lengths,
                                   scratch.keys,         params.cache_lengths, params.indices};
    if (may_evict(params)) {
        // Small tiles spread a prompt over more blocks; a wide kernel would leave them little but margins.
        constexpr int kWideKernel = 1024;
        params.pool_kernel < kWideKernel ? launch_pooling<256>(params, pool, stream)
                                         : launch_pooling<1024>(params, pool, stream);
    }
    const dim3 grid(params.kv_heads, params.batch);
    launch("select_prompt", select_prompt<kSelectThreads>, grid, dim3(kSelectThreads), 0, stream, pool);
}

/// Shares of about 48 slots: enough bytes per block, and enough blocks for a whole GPU at batch 1.
PageLayout page_layout(const KvcCompactParams& params) {
    constexpr int kSlotsPerBlock = 48;
    constexpr int kMostColumns = 32;
    // Where no bounds are kept, a page is only what one thread copies.
    const int64_t page_size = params.bounds == nullptr ? kRowsInFlight : params.page_size;
    const auto capacity = static_cast<int32_t>(params.capacity);
    PageLayout layout{};
    layout.page_size = static_cast<int32_t>(std::min(page_size, params.capacity));
    layout.pages = ceil_div(capacity, layout.page_size);
    layout.segment_slots = std::max(kRowsInFlight, ceil_div(layout.page_size, kMostColumns));
    layout.segments = ceil_div(layout.page_size, layout.segment_slots);
    layout.pages_per_block = std::clamp(kSlotsPerBlock / layout.page_size, 1, kMostColumns);
    return layout;
}

template <class T>
GatherParams<T> gather_params(const KvcCompactParams& params) {
    return {params.kv_heads,
            params.head_size,
            static_cast<int32_t>(params.capacity),
            params.kv_stride_batch,
            params.kv_stride_head,
            params.kv_stride_token,
            static_cast<const T*>(params.k),
            static_cast<const T*>(params.v),
            params.indices,
            params.cache_lengths,
            static_cast<T*>(params.k_cache),
            static_cast<T*>(params.v_cache),
            static_cast<T*>(params.bounds),
            page_layout(params),
            compacts_in_place(params)};
}

template <class T>
void launch_gather(const KvcCompactParams& params, cudaStream_t stream) {
    const GatherParams<T> gather = gather_params<T>(params);
    if (gather.in_place && may_evict(params)) {
        const int slices = ceil_div(params.head_size / kVectorWidth<T>, kSliceVectors);
        const dim3 grid(2 * slices, params.kv_heads, params.batch);
        launch("move_in_place", move_in_place<T>, grid, dim3(kGatherThreads), 0, stream, gather);
    }
    const PageLayout& layout = gather.layout;
    const auto blocks = static_cast<unsigned>(ceil_div(layout.pages, layout.pages_per_block));
    const dim3 grid(blocks, params.kv_heads, params.batch);
    const size_t shared_bytes = sizeof(T) * layout.columns() * bounds_pitch<T>(params.head_size);
    launch("gather_cache", gather_cache<T>, grid, dim3(kGatherThreads), shared_bytes, stream, gather);
}

}  // namespace
}  // namespace kvc

extern "C" KvcStatus kvc_compact_workspace(const KvcCompactParams* params, uint64_t* bytes, KvcMessage* message) {
    return kvc::guard(message, [&] {
        kvc::validate_sizes(params);
        kvc::validate_result(bytes);
        *bytes = kvc::workspace_bytes(*params);
    });
}

extern "C" KvcStatus kvc_compact(const KvcCompactParams* params, void* workspace, uint64_t workspace_bytes,
                                 void* stream, KvcMessage* message) {
    return kvc::guard(message, [&] {
        kvc::validate(params);
        kvc::validate_workspace(workspace, workspace_bytes, kvc::workspace_bytes(*params));
        kvc::Workspace parts(workspace, workspace_bytes);
        const kvc::CompactScratch scratch = kvc::lay_out(*params, parts);
        const auto cuda_stream = static_cast<cudaStream_t>(stream);
        kvc::dispatch_dtype(params->dtype, [&](auto tag) {
            using T = typename decltype(tag)::Type;
            if (kvc::may_evict(*params)) {
                kvc::launch_observation<T>(*params, scratch.observation, scratch.votes, cuda_stream);
            }
            kvc::launch_selection(*params, scratch, cuda_stream);
            kvc::launch_gather<T>(*params, cuda_stream);
        });
    });
}
