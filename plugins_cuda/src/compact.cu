// kvc_compact and kvc_compact_turn: observation scores, pooling and selection, then the caches and their bounds.
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
    uint32_t* keys;  // [B,G,key_stride_of]
};

/// Elements of a row of keys: whole vectors.
int64_t key_stride_of(const KvcCompactParams& params) {
    return static_cast<int64_t>(align_up(params.prompt_length, kVectorWidth<uint32_t>));
}

/// Where rows have budgets of their own, the host does not know them.
bool may_evict(const KvcCompactParams& params) {
    return params.by_length != 0 || params.prompt_length > params.prompt_budget;
}

PoolSelectParams pool_select_params(const KvcCompactParams& params, const int64_t* window_lengths,
                                    const CompactScratch& scratch) {
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
    pool.window_lengths = window_lengths;
    pool.prompt_budgets = params.by_length != 0 ? params.prompt_budgets : nullptr;
    pool.pool_kernels = params.by_length != 0 ? params.pool_kernels : nullptr;
    pool.key_stride = key_stride_of(params);
    pool.keys = scratch.keys;
    pool.cache_lengths = params.cache_lengths;
    pool.indices = params.indices;
    return pool;
}

/// All launches; `window_lengths` [B] gives the number of queries of a row's window that vote, null: all.
template <class T>
void compact(const KvcCompactParams& params, const int64_t* window_lengths, const CompactScratch& scratch,
             Stream& stream) {
    if (may_evict(params)) {
        launch_observation<T>(params, window_lengths, scratch.observation, scratch.votes, stream);
    }
    launch_pool_select(pool_select_params(params, window_lengths, scratch), stream);
    if (params.cache_format != 0) {
        launch_gather_in_format<T>(params, stream);
        return;
    }
    if (may_evict(params) && compacts_in_place(params)) {
        launch_move_in_place<T>(params, stream);
    }
    launch_gather<T>(params, stream);
}

struct Compact {
    static CompactScratch lay_out(const KvcCompactParams& params, Workspace& workspace) {
        if (!may_evict(params)) {
            return {};
        }
        const int64_t batch = params.batch, kv_heads = params.kv_heads;
        return {take_observation_scratch(params, workspace),
                workspace.take<float>({batch, kv_heads, params.prompt_length}),
                workspace.take<uint32_t>({batch, kv_heads, key_stride_of(params)})};
    }

    template <class T>
    static void run(const KvcCompactParams& params, const CompactScratch& scratch, Stream& stream) {
        compact<T>(params, nullptr, scratch, stream);
    }
};

/// Stored and new tokens are one contiguous table, like the tokens of a prompt.
KvcCompactParams as_prompt(const KvcCompactTurnParams& turn) {
    KvcCompactParams prompt{};
    prompt.dtype = turn.dtype;
    prompt.batch = turn.batch;
    prompt.heads = turn.heads;
    prompt.kv_heads = turn.kv_heads;
    prompt.head_size = turn.head_size;
    prompt.window = turn.window;
    prompt.pool_kernel = turn.pool_kernel;
    prompt.page_size = turn.page_size;
    prompt.fp8_bounds = turn.fp8_bounds;
    prompt.by_length = turn.by_length;
    prompt.cache_format = turn.cache_format;
    prompt.prompt_length = turn.prompt_length;
    prompt.prompt_budget = turn.prompt_budget;
    prompt.capacity = turn.capacity;
    prompt.kv_stride_token = turn.head_size;
    prompt.kv_stride_head = turn.prompt_length * prompt.kv_stride_token;
    prompt.kv_stride_batch = turn.kv_heads * prompt.kv_stride_head;
    prompt.q_window = turn.q_window;
    prompt.k = turn.k;
    prompt.v = turn.v;
    prompt.prompt_lengths = turn.prompt_lengths;
    prompt.prompt_budgets = turn.prompt_budgets;
    prompt.pool_kernels = turn.pool_kernels;
    prompt.k_cache = turn.k_cache;
    prompt.v_cache = turn.v_cache;
    prompt.bounds = turn.bounds;
    prompt.cache_lengths = turn.cache_lengths;
    prompt.indices = turn.indices;
    return prompt;
}

/// Scratch memory of a turn's compaction; keys in a format are widened for the votes.
struct CompactTurnScratch {
    CompactScratch compact;
    float* queries = nullptr;  // [B,H,W,D]
    float* keys = nullptr;     // [B,G,S,D]
};

template <class T>
void launch_widen(const VectorTable& vectors, int32_t head_size, int64_t count, float* to, Stream& stream) {
    const WidenParams<T> params{vectors, to, count, head_size};
    launch<widen_vectors<T>>("widen_vectors", grid_of(ceil_div(count, int64_t{kRowsOfBlock}), 1), dim3(kRowThreads), 0,
                             stream, params);
}

/// A turn's compaction of tables in a format: votes over the dequantised keys, in fp32; then codes move.
template <class T>
void compact_stored(const KvcCompactTurnParams& turn, const CompactTurnScratch& scratch, Stream& stream) {
    KvcCompactParams prompt = as_prompt(turn);
    if (may_evict(prompt)) {
        const VectorTable queries =
            vector_table(VectorFormat::kExact, turn.dtype, turn.head_size, turn.q_window, nullptr, nullptr);
        const int64_t rows = int64_t{turn.batch} * turn.heads * turn.window;
        const int64_t tokens = int64_t{turn.batch} * turn.kv_heads * turn.prompt_length;
        launch_widen<T>(queries, turn.head_size, rows, scratch.queries, stream);
        launch_widen<T>(joined_tables(turn).keys, turn.head_size, tokens, scratch.keys, stream);
        prompt.q_window = scratch.queries;
        prompt.k = scratch.keys;
        launch_observation<float>(prompt, turn.window_lengths, scratch.compact.observation, scratch.compact.votes,
                                  stream);
    }
    launch_pool_select(pool_select_params(prompt, turn.window_lengths, scratch.compact), stream);
    launch_gather_stored<T>(turn, stream);
}

struct CompactTurn {
    static CompactTurnScratch lay_out(const KvcCompactTurnParams& params, Workspace& workspace) {
        const KvcCompactParams prompt = as_prompt(params);
        CompactTurnScratch scratch{Compact::lay_out(prompt, workspace)};
        if (params.cache_format != 0 && may_evict(prompt)) {
            scratch.queries = workspace.take<float>({params.batch, params.heads, params.window, params.head_size});
            scratch.keys =
                workspace.take<float>({params.batch, params.kv_heads, params.prompt_length, params.head_size});
        }
        return scratch;
    }

    template <class T>
    static void run(const KvcCompactTurnParams& params, const CompactTurnScratch& scratch, Stream& stream) {
        if (params.cache_format != 0) {
            compact_stored<T>(params, scratch, stream);
        } else {
            compact<T>(as_prompt(params), params.window_lengths, scratch.compact, stream);
        }
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

extern "C" KvcStatus kvc_compact_turn_workspace(const KvcCompactTurnParams* params, uint64_t* bytes,
                                                KvcMessage* message) {
    return kvc::query_workspace<kvc::CompactTurn>(params, bytes, message);
}

extern "C" KvcStatus kvc_compact_turn(const KvcCompactTurnParams* params, void* workspace, uint64_t workspace_bytes,
                                      void* stream, KvcMessage* message) {
    return kvc::call<kvc::CompactTurn>(params, workspace, workspace_bytes, stream, message);
}
