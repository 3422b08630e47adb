// Host code of the two attention operations: which part of its cache a row reads, the scratch memory of the
// attention kernel, and its launch.
//
// `Params` is KvcDenseAttentionParams or KvcHybridAttentionParams, except in joined_token: the operations that rotate
// their new token convert their parameters into those of the plain operations (src/rotated_parameters.h).
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/append.cuh"
#include "kernels/sparse_attention.cuh"
#include "kvc/attention.h"
#include "src/cache_tables.h"
#include "src/launch.h"
#include "src/rotated_parameters.h"

namespace kvc {

/// Query heads of a KV head.
template <class Params>
int32_t group_of(const Params& params) {
    return params.heads / params.kv_heads;
}

/// The limits where every row reads all its entries, at most the capacity.
inline AttentionLimits limits_of(const KvcDenseAttentionParams& params) {
    return {params.capacity, params.capacity, params.capacity, 0};
}

inline AttentionLimits limits_of(const KvcHybridAttentionParams& params) {
    return {params.capacity, params.top_k, std::max(params.token_budget, params.dense_until), params.recent};
}

/// Entries that blocks are launched for. The blocks of a row that reads more take several splits each.
inline int64_t usually_attended(const KvcDenseAttentionParams& params) { return params.capacity; }

/// Entries that a sparse row reads. Rows within the token budget are few and short; those in `dense_until` are neither.
inline int64_t usually_attended(const KvcHybridAttentionParams& params) {
    const int64_t long_rows = params.dense_until > params.token_budget ? params.dense_until : 0;
    return std::min(std::max(params.top_k, long_rows), params.capacity);
}

/// The most entries that any row can read: it fixes workspaces.
inline int64_t most_attended(const AttentionLimits& limits) {
    return std::min(std::max(limits.top_k, limits.dense_limit), limits.capacity);
}

/// The most splits of any row that reads at most `count` entries of caches that are exact or in a format; split_plan
/// divides one row.
inline int32_t most_splits(int64_t count, bool exact) {
    const int64_t shortest = shortest_split(exact);
    const int64_t splits = count <= unsplit_tokens(exact) ? 1 : ceil_div(count, shortest);
    return static_cast<int32_t>(std::min(splits, int64_t{kMostSplits}));
}

/// Takes the scratch memory of the attention kernel from the workspace.
template <class Params>
AttentionScratch take_attention_scratch(const Params& params, Workspace& workspace) {
    AttentionScratch scratch{};
    scratch.splits = most_splits(most_attended(limits_of(params)), params.cache_format == 0);
    const int64_t kept = scratch.splits > 1 ? scratch.splits : 0;
    scratch.arrivals = workspace.take<int32_t>({params.batch, params.kv_heads});
    scratch.parts = workspace.take<SoftmaxPart>({params.batch, params.heads, kept});
    scratch.outputs = workspace.take<float>({params.batch, params.heads, kept, params.head_size});
    return scratch;
}

/// The new token of every row, already rotated, in three tensors.
template <class T, class Params>
NewToken<T> separate_token(const Params& params) {
    NewToken<T> token{};
    token.query = static_cast<const T*>(params.query);
    token.key = static_cast<const T*>(params.k_new);
    token.value = static_cast<const T*>(params.v_new);
    token.query_row = int64_t{params.heads} * params.head_size;
    token.entry_row = int64_t{params.kv_heads} * params.head_size;
    return token;
}

/// The new token of every row as one product of the joined projections, not rotated yet.
template <class T, class Params>
NewToken<T> joined_token(const Params& params) {
    const int64_t heads = int64_t{params.heads} * params.head_size;
    const int64_t kv_heads = int64_t{params.kv_heads} * params.head_size;
    NewToken<T> token{};
    token.query = static_cast<const T*>(params.joined);
    token.key = token.query + heads;
    token.value = token.key + kv_heads;
    token.query_row = token.entry_row = heads + 2 * kv_heads;
    token.cosines = params.cosines;
    token.sines = params.sines;
    token.rotated = static_cast<T*>(params.query);
    return token;
}

/// The new token and its destination.
template <class T, class Params>
AppendParams<T> append_params(const Params& params, const NewToken<T>& token, int32_t* arrivals) {
    AppendParams<T> append{};
    append.token = token;
    const CachePair tables = cache_tables(params);
    append.keys = tables.keys;
    append.values = tables.values;
    append.cache_lengths = params.cache_lengths;
    append.arrivals = arrivals;
    append.capacity = params.capacity;
    append.kv_heads = params.kv_heads;
    append.group = group_of(params);
    append.head_size = params.head_size;
    return append;
}

/// The operation after its new token is rotated. `Plain` is an operation with a function `step`, which takes the token.
template <class Plain>
struct Rotated {
    template <class Params>
    static auto lay_out(const Params& params, Workspace& workspace) {
        return Plain::lay_out(with_rotated_query(params), workspace);
    }

    template <class T, class Params, class Scratch>
    static void run(const Params& params, const Scratch& scratch, Stream& stream) {
        Plain::step(with_rotated_query(params), joined_token<T>(params), scratch, stream);
    }
};

/// The slots that each sparse row reads, ascending; null where no row is sparse.
struct TokenList {
    const int32_t* indices = nullptr;  // [B,G,stride]
    int64_t stride = 0;
};

/// Distance of two lists of `top_k` slots: the attention kernel copies whole vectors.
inline int64_t list_stride(int64_t top_k) { return ceil_div(top_k, int64_t{kListVector}) * kListVector; }

/// Bytes of dynamic shared memory of a block whose warps copy `stages` tiles ahead.
template <class T, int kHeadSize, class Formats>
size_t attention_bytes(int32_t stages) {
    return sizeof(float) * kAttentionWarps * warp_floats<T, kHeadSize, Formats>(stages);
}

/// Tiles that a warp copies ahead. Two where blocks are so few that each has a multiprocessor to itself: then all reads
/// of a row of two rounds are under way at once. Otherwise one, so that two blocks share a multiprocessor. Results do
/// not depend on the number.
template <class T, int kHeadSize, class Formats>
int32_t stages_for(const dim3& grid) {
    constexpr const char* kName = "sparse_attention";
    constexpr size_t kMostBytes = 128 * 1024;
    const bool fits = attention_bytes<T, kHeadSize, Formats>(2) <= kMostBytes;
    if (!fits || !is_on(Switch::kRing)) {
        return 1;
    }
    const int multiprocessors = platform::multiprocessors_of(kName, platform::current_device(kName));
    return uint64_t{grid.x} * grid.y * grid.z <= static_cast<uint64_t>(multiprocessors) ? 2 : 1;
}

/// What scores are multiplied by: log2(e) / sqrt(D).
inline float attention_scale(int32_t head_size) {
    return static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(head_size)));
}

/// Queues the attention of rows whose caches are in a format (src/attention_in_format.cu).
template <class T>
void launch_attention_in_format(int32_t cache_format, const dim3& grid, SparseAttentionParams<T> attention,
                                Stream& stream);

/// Queues the attention of every row; scratch.arrivals must be zero when it runs.
template <class T, class Params>
void launch_attention(const Params& params, const AttentionScratch& scratch, const TokenList& list, Stream& stream) {
    SparseAttentionParams<T> attention{};
    attention.query = static_cast<const T*>(params.query);
    const CachePair tables = cache_tables(params);
    attention.keys = tables.keys;
    attention.values = tables.values;
    attention.cache_lengths = params.cache_lengths;
    attention.indices = list.indices;
    attention.output = static_cast<T*>(params.output);
    attention.scratch = scratch;
    attention.limits = limits_of(params);
    attention.index_stride = list.stride;
    attention.kv_heads = params.kv_heads;
    attention.group = group_of(params);
    attention.head_size = params.head_size;
    attention.scale = attention_scale(params.head_size);
    const int32_t splits = most_splits(usually_attended(params), params.cache_format == 0);
    const dim3 grid = grid_of(params.kv_heads, params.batch, splits);
    if (params.cache_format != 0) {
        return launch_attention_in_format(params.cache_format, grid, attention, stream);
    }
    dispatch_head_size(params.head_size, [&](auto head_size) {
        constexpr int kHeadSize = decltype(head_size)::value;
        attention.stages = stages_for<T, kHeadSize, ExactFormats>(grid);
        const size_t bytes = attention_bytes<T, kHeadSize, ExactFormats>(attention.stages);
        launch<sparse_attention<T, kHeadSize>>("sparse_attention", grid, dim3(kAttentionThreads), bytes, stream,
                                               attention);
    });
}

}  // namespace kvc
