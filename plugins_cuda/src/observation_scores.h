// Observation scores (RocketKV, arXiv 2502.14051, stage 1): which prompt tokens the last W queries look at.
//
//     x[h,i,j] = q[h,i] · k[h / (H/G), j] / sqrt(D), hidden where j > n-W+i;  votes[g,j] = sum over h in g, i of softmax_j(x)
//
// for every batch row of more keys n than its budget, j < n-W, never materialising [H,W,S]: pass A
// (observation_statistics.cuh) reads K for the softmax statistics, a merge makes them whole, pass B
// (observation_votes.cuh) reads K again and adds up probabilities. Three launches with grids that depend on sizes
// alone; blocks of rows that keep everything return at once.
//
// Scratch: partials [B,H,W,N] and weights [B,H,W] of float2, N = ceil(S / 512).
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/observation_statistics.cuh"
#include "kernels/observation_votes.cuh"
#include "kvc/compact.h"
#include "src/launch.h"

namespace kvc {

// Shared memory of a block: two blocks fit on a Hopper SM, one on the smallest SM that runs sm_80 code.
constexpr size_t kObservationSharedBytes = 96 * 1024;

struct ObservationScratch {
    float2* partials;  // [B,H,W,N]
    float2* weights;   // [B,H,W]
};

inline int64_t observation_chunks(const KvcCompactParams& compact) {
    return ceil_div(compact.prompt_length, int64_t{kChunkKeys});
}

inline ObservationScratch take_observation_scratch(const KvcCompactParams& compact, Workspace& workspace) {
    const int64_t chunks = observation_chunks(compact);
    ObservationScratch scratch;
    scratch.partials = workspace.take<float2>({compact.batch, compact.heads, compact.window, chunks});
    scratch.weights = workspace.take<float2>({compact.batch, compact.heads, compact.window});
    return scratch;
}

// Query rows in shared memory at a time: all of them, or the largest equal parts that fit, in whole tiles.
template <class T, class Tile>
int32_t observation_block_rows(const KvcCompactParams& compact) {
    using Shared = ObservationShared<T, Tile>;
    const size_t fixed = Shared::bytes(0, compact.head_size);
    const size_t tile_bytes = Shared::bytes(kQueryTile, compact.head_size) - fixed;
    const auto most_tiles = static_cast<int32_t>((kObservationSharedBytes - fixed) / tile_bytes);
    const int32_t tiles = ceil_div(compact.heads / compact.kv_heads * compact.window, kQueryTile);
    return ceil_div(tiles, ceil_div(tiles, most_tiles)) * kQueryTile;
}

template <class T>
ObservationParams<T> observation_params(const KvcCompactParams& compact, const int64_t* window_lengths,
                                        const ObservationScratch& scratch, float* votes) {
    ObservationParams<T> params{};
    params.q_window = static_cast<const T*>(compact.q_window);
    params.k = static_cast<const T*>(compact.k);
    params.prompt_lengths = compact.prompt_lengths;
    params.window_lengths = window_lengths;
    params.prompt_budgets = compact.by_length != 0 ? compact.prompt_budgets : nullptr;
    params.partials = scratch.partials;
    params.weights = scratch.weights;
    params.votes = votes;
    params.prompt_length = compact.prompt_length;
    params.prompt_budget = compact.prompt_budget;
    params.kv_stride_batch = compact.kv_stride_batch;
    params.kv_stride_head = compact.kv_stride_head;
    params.kv_stride_token = compact.kv_stride_token;
    params.chunks = observation_chunks(compact);
    params.batch = compact.batch;
    params.heads = compact.heads;
    params.kv_heads = compact.kv_heads;
    params.head_size = compact.head_size;
    params.window = compact.window;
    params.scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(compact.head_size)));
    return params;
}

template <class T, class Tile>
void launch_observation_tiles(ObservationParams<T> params, int32_t block_rows, Stream& stream) {
    params.block_rows = block_rows;
    const size_t shared = ObservationShared<T, Tile>::bytes(block_rows, params.head_size);
    const dim3 grid = grid_of(params.chunks, params.kv_heads, params.batch);
    const dim3 threads(Tile::kWarps * kWarpSize);
    const int64_t rows = int64_t{params.batch} * params.heads * params.window;
    const dim3 merge_grid = grid_of(ceil_div(rows, int64_t{kMergeThreads / kWarpSize}), 1);
    launch<observation_statistics<T, Tile>>("observation_statistics", grid, threads, shared, stream, params);
    launch<observation_merge<T>>("observation_merge", merge_grid, dim3(kMergeThreads), 0, stream, params);
    launch<observation_votes<T, Tile>>("observation_votes", grid, threads, shared, stream, params);
}

// Queues the three launches. Writes votes [B,G,S] before n-V of every row of n > its budget; V is its entry of
// `window_lengths` [B], or W where that is null.
template <class T>
void launch_observation(const KvcCompactParams& compact, const int64_t* window_lengths,
                        const ObservationScratch& scratch, float* votes, Stream& stream) {
    const auto params = observation_params<T>(compact, window_lengths, scratch, votes);
    const auto run = [&]<class Tile>(Tile*) {
        launch_observation_tiles<T, Tile>(params, observation_block_rows<T, Tile>(compact), stream);
    };
    if constexpr (sizeof(T) == sizeof(float)) {
        run(static_cast<KeyTile<T, 0>*>(nullptr));
    } else {
        switch (ceil_div(compact.head_size, 32)) {
            case 1: return run(static_cast<KeyTile<T, 1>*>(nullptr));
            case 2: return run(static_cast<KeyTile<T, 2>*>(nullptr));
            case 3: return run(static_cast<KeyTile<T, 3>*>(nullptr));
            case 4: return run(static_cast<KeyTile<T, 4>*>(nullptr));
            default: return run(static_cast<KeyTile<T, 8>*>(nullptr));
        }
    }
}

}  // namespace kvc
