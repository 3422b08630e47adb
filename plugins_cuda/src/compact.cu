// kvc_compact: observation scores, pooling and selection, then the caches and their bounds.
#include <cstddef>

#include "kvc/compact.h"
#include "src/gather_cache.h"
#include "src/observation_scores.h"
#include "src/operation.h"
#include "src/pool_select.h"

namespace kvc {
namespace {

/// Scratch memory of one call; empty where no prompt of the batch can exceed the budget.
struct CompactScratch {
    ObservationScratch observation;
    float* votes;    // [B,G,S]
    uint32_t* keys;  // [B,G,S]
};

bool may_evict(const KvcCompactParams& params) { return params.prompt_length > params.prompt_budget; }

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

struct Compact {
    static CompactScratch lay_out(const KvcCompactParams& params, Workspace& workspace) {
        if (!may_evict(params)) {
            return {};
        }
        const auto per_token = {int64_t{params.batch}, int64_t{params.kv_heads}, params.prompt_length};
        return {take_observation_scratch(params, workspace), workspace.take<float>(per_token),
                workspace.take<uint32_t>(per_token)};
    }

    template <class T>
    static void run(const KvcCompactParams& params, const CompactScratch& scratch, cudaStream_t stream) {
        if (may_evict(params)) {
            launch_observation<T>(params, scratch.observation, scratch.votes, stream);
        }
        launch_pool_select(pool_select_params(params, scratch), stream);
        if (may_evict(params) && compacts_in_place(params)) {
            launch_move_in_place<T>(params, stream);
        }
        launch_gather<T>(params, stream);
    }
};

}  // namespace
}  // namespace kvc

extern "C" KvcStatus kvc_compact_workspace(const KvcCompactParams* params, uint64_t* bytes, KvcMessage* message) {
    return kvc::query_workspace<kvc::Compact>(params, bytes, message);
}

extern "C" KvcStatus kvc_compact(const KvcCompactParams* params, void* workspace, uint64_t workspace_bytes,
                                 void* stream, KvcMessage* message) {
    return kvc::call<kvc::Compact>(params, workspace, workspace_bytes, stream, message);
}
