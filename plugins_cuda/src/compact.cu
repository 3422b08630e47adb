// kvc_compact: observation scores, pooling and selection, then the caches and their bounds.
#include <cstddef>

#include "kernels/gather_cache.cuh"
#include "kernels/move_in_place.cuh"
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

PoolSelectParams pool_select_params(const KvcCompactParams& params, const CompactScratch& scratch) {
    PoolSelectParams pool{};
    pool.batch = params.batch;
    pool.kv_heads = params.kv_heads;
    pool.window = params.window;
    pool.pool_kernel = params.pool_kernel;
    pool.prompt_length = params.prompt_length;
    pool.prompt_budget = params.prompt_budget;
    pool.capacity = params.capacity;
    pool.votes = scratch.votes;
    pool.prompt_lengths = params.prompt_lengths;
    pool.keys = scratch.keys;
    pool.cache_lengths = params.cache_lengths;
    pool.indices = params.indices;
    return pool;
}

template <class T>
GatherParams<T> gather_params(const KvcCompactParams& params) {
    const auto capacity = static_cast<int32_t>(params.capacity);
    GatherParams<T> gather{};
    gather.batch = params.batch;
    gather.kv_heads = params.kv_heads;
    gather.head_size = params.head_size;
    gather.capacity = capacity;
    gather.stride_batch = params.kv_stride_batch;
    gather.stride_head = params.kv_stride_head;
    gather.stride_token = params.kv_stride_token;
    gather.k = static_cast<const T*>(params.k);
    gather.v = static_cast<const T*>(params.v);
    gather.indices = params.indices;
    gather.cache_lengths = params.cache_lengths;
    gather.k_cache = static_cast<T*>(params.k_cache);
    gather.v_cache = static_cast<T*>(params.v_cache);
    gather.bounds = static_cast<T*>(params.bounds);
    gather.layout = page_layout(capacity, params.page_size, params.bounds != nullptr);
    gather.in_place = compacts_in_place(params);
    return gather;
}

template <class T>
MoveParams<T> move_params(const KvcCompactParams& params) {
    MoveParams<T> move{};
    move.batch = params.batch;
    move.kv_heads = params.kv_heads;
    move.head_size = params.head_size;
    move.capacity = static_cast<int32_t>(params.capacity);
    move.k_cache = static_cast<T*>(params.k_cache);
    move.v_cache = static_cast<T*>(params.v_cache);
    move.indices = params.indices;
    move.cache_lengths = params.cache_lengths;
    return move;
}

template <class T>
void launch_compact(const KvcCompactParams& params, const CompactScratch& scratch, cudaStream_t stream) {
    if (may_evict(params)) {
        launch_observation<T>(params, scratch.observation, scratch.votes, stream);
    }
    launch_pool_select(pool_select_params(params, scratch), stream);
    if (may_evict(params) && compacts_in_place(params)) {
        launch_move_in_place(move_params<T>(params), stream);
    }
    launch_gather(gather_params<T>(params), stream);
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
        kvc::dispatch_dtype(params->dtype, [&](auto tag) {
            using T = typename decltype(tag)::Type;
            kvc::launch_compact<T>(*params, scratch, static_cast<cudaStream_t>(stream));
        });
    });
}
