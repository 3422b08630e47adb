// Pass A of the observation scores: maximum and sum of exponentials of every window query over all its keys.
//
// observation_statistics: one block per chunk of keys, KV head and batch row; each warp walks through its tiles of
// the chunk and keeps the statistic of every query row in its own shared memory; at the end the warps' are merged in
// order.
// observation_merge: one warp per query row merges its chunks: lanes in a stride, then an xor butterfly.
//
// Bytes: K once (B·G·n·D elements), partials B·H·W·N·8 written and read. Flops: 2·B·H·W·n·D and B·H·W·n exponentials.
// More query rows than fit in shared memory (block_rows) are taken block by block; the chunk is then read again, usually
// from L2.
//
// Determinism: every order is a function of n; a column's logits do not depend on its position.
#pragma once

#include "kernels/dependent_launch.cuh"
#include "kernels/observation_row.cuh"

namespace kvc {

// Causal window: row i, the query at n-W+i, does not see later keys. Hidden logits become -inf. A row without a vote
// is a copy of the first row that votes.
template <int kGroups>
__device__ __forceinline__ void hide_future(float (&logits)[kGroups][4], int64_t first_key, int64_t first_hidden,
                                            int row, int window, int silent) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t hidden = first_hidden + max((row + half * kKeyGroup) % window, silent);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int64_t key = first_key + group * kKeyGroup + 2 * lane_of_quad() + i;
                float& logit = logits[group][2 * half + i];
                logit = key >= hidden ? -INFINITY : logit;
            }
        }
    }
}

// `seen` and the logits of one query row in a tile; each of the four lanes of a quad holds a part of them.
template <int kHalf, int kGroups>
__device__ __forceinline__ float2 add_tile(float2 seen, const float (&logits)[kGroups][4], float scale) {
    float largest = -INFINITY;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        largest = fmaxf(largest, fmaxf(logits[group][2 * kHalf], logits[group][2 * kHalf + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));

    const float maximum = fmaxf(seen.x, largest * scale);
    const float origin = exponent_origin(maximum);
    float sum = 0;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        sum += exp2f(logits[group][2 * kHalf] * scale - origin);
        sum += exp2f(logits[group][2 * kHalf + 1] * scale - origin);
    }
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    return make_float2(maximum, seen.y * exp2f(seen.x - origin) + sum);
}

// Adds a tile of keys to the warp's statistics of the query rows first_row..first_row + block_rows - 1.
template <class T, class Tile>
__device__ __forceinline__ void observe_tile(const ObservationParams<T>& params, const Tile& keys, int64_t first_key,
                                             const ObservedChunk<T>& chunk, int first_row,
                                             SharedSpan<float2> statistics) {
    const auto queries = ObservationShared<T, Tile>::queries(params);
    const int64_t first_hidden = chunk.n - params.window + 1;  // for row 0
    const bool sees_future = first_key + Tile::kKeys > first_hidden;
    for (int tile = 0; tile < params.block_rows / kQueryTile; ++tile) {
        float logits[Tile::kGroups][4] = {};
        keys.multiply(queries, tile, logits);
        const int upper = tile * kQueryTile + quad_of_lane(), lower = upper + kKeyGroup;
        if (sees_future) {
            hide_future(logits, first_key, first_hidden, first_row + upper, params.window, chunk.silent);
        }
        const float2 upper_statistic = add_tile<0>(statistics[upper], logits, params.scale);
        const float2 lower_statistic = add_tile<1>(statistics[lower], logits, params.scale);
        __syncwarp();  // the shuffles of add_tile order no memory: all four lanes have read the old numbers
        if (lane_of_quad() == 0) {
            statistics[upper] = upper_statistic;
            statistics[lower] = lower_statistic;
        }
    }
    __syncwarp();
}

// Merges the warps' statistics of the query rows from `first_row` on and stores the result for the chunk.
template <class T, class Tile>
__device__ __forceinline__ void store_partials(const ObservationParams<T>& params, const ObservedChunk<T>& chunk,
                                               int first_row) {
    const auto statistics = ObservationShared<T, Tile>::row_values(params);
    const int rows = min(params.block_rows, chunk.rows - first_row);
    for (int row = threadIdx.x; row < rows; row += Tile::kWarps * kWarpSize) {
        float2 merged = statistics[row];
        for (int warp = 1; warp < Tile::kWarps; ++warp) {
            merged = merge_statistics(merged, statistics[warp * params.block_rows + row]);
        }
        params.partials[(chunk.first_row + first_row + row) * params.chunks + blockIdx.x] = merged;
    }
}

// Grid (N, G, B).
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kWarps* kWarpSize, 2)
    observation_statistics(const ObservationParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const ObservedChunk<T> chunk(params);
    if (chunk.first >= chunk.n) {
        return;
    }
    const int64_t end = min(chunk.first + kChunkKeys, chunk.n);
    const int warp = warp_index();
    const auto statistics =
        ObservationShared<T, Tile>::row_values(params).part(warp * params.block_rows, params.block_rows);
    Tile keys = ObservationShared<T, Tile>::key_tile(params, warp);

    for (int first_row = 0; first_row < chunk.rows; first_row += params.block_rows) {
        stage_queries<T, Tile>(params, chunk, first_row);
        for (int row = lane_index(); row < params.block_rows; row += kWarpSize) {
            statistics[row] = make_float2(-INFINITY, 0.0f);
        }
        __syncthreads();
        for (int64_t key = chunk.first + warp * Tile::kKeys; key < end; key += Tile::kWarps * Tile::kKeys) {
            keys.load(chunk.tile(params, key));
            observe_tile<T>(params, keys, key, chunk, first_row, statistics);
        }
        __syncthreads();
        store_partials<T, Tile>(params, chunk, first_row);
        __syncthreads();
    }
}

constexpr int kMergeThreads = 256;

// Grid (ceil(B·H·W / 8)): partials -> weights. A NaN or +inf among its logits makes the weight of a row NaN, and with it
// every vote of its KV head; so do logits of -inf alone (0 times 1 / 0). A row that does not vote weighs nothing.
template <class T>
__global__ void __launch_bounds__(kMergeThreads) observation_merge(const ObservationParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x) / kWarpSize;
    const int64_t b = row / (static_cast<int64_t>(params.heads) * params.window);
    if (b >= params.batch) {
        return;
    }
    const int64_t n = observed_keys(params, b);
    const float2* partials = params.partials + row * params.chunks;
    float2 statistic = make_float2(-INFINITY, 0.0f);
    for (int64_t chunk = lane_index(); chunk * kChunkKeys < n; chunk += kWarpSize) {
        statistic = merge_statistics(statistic, partials[chunk]);
    }
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
        const float2 other =
            make_float2(__shfl_xor_sync(kFullWarp, statistic.x, lanes), __shfl_xor_sync(kFullWarp, statistic.y, lanes));
        statistic = merge_statistics(statistic, other);
    }
    if (lane_index() == 0) {
        const bool votes = row % params.window >= silent_rows(params, b);
        params.weights[row] = make_float2(exponent_origin(statistic.x), votes ? 1.0f / statistic.y : 0.0f);
    }
}

}  // namespace kvc
