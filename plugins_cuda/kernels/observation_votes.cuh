// Pass B of the observation scores: votes[b,g,j] = sum over the group's heads and window rows of the attention
// probability of key j, for the keys before the window (RocketKV, arXiv 2502.14051, algorithm 1: the sum precedes the
// pooling).
//
// One block per chunk of keys, KV head and batch row. A warp owns its keys for all query rows: a lane adds up the
// rows that it holds, in order, and an xor butterfly adds up the eight lanes of a column: no atomics and no barrier.
//
// Bytes: K once more (B·G·n·D elements), weights B·H·W·8 a block, votes B·G·n·4. Flops and exponentials as in pass A.
//
// Determinism: every column goes through the same additions in the same order, at any position; equal keys get
// bit-equal votes.
#pragma once

#include "kernels/dependent_launch.cuh"
#include "kernels/observation_row.cuh"

namespace kvc {

// Global -> shared memory: the weight of every query row's logits, {maximum, 1 / sum}; rows past the last weigh nothing.
template <class T>
__device__ __forceinline__ void stage_weights(const ObservationParams<T>& params, const ObservedChunk<T>& chunk,
                                              int first_row, SharedSpan<float2> weights) {
    for (int row = threadIdx.x; row < params.block_rows; row += blockDim.x) {
        const int source = min(first_row + row, chunk.rows - 1);
        const float2 weight = params.weights[chunk.first_row + source];
        weights[row] = first_row + row < chunk.rows ? weight : make_float2(weight.x, 0.0f);
    }
}

// Adds the probabilities of a lane's logits to its two keys of every group.
template <int kGroups>
__device__ __forceinline__ void add_probabilities(float (&votes)[kGroups][2], const float (&logits)[kGroups][4],
                                                  float2 upper, float2 lower, float scale) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            votes[group][i] += exp2f(logits[group][i] * scale - upper.x) * upper.y;
            votes[group][i] += exp2f(logits[group][i + 2] * scale - lower.x) * lower.y;
        }
    }
}

// Completes the warp's votes and stores them, or adds them to those of earlier query rows.
template <int kGroups>
__device__ __forceinline__ void store_votes(const float (&votes)[kGroups][2], float* output, int64_t first_key,
                                            int64_t end, bool is_first) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = votes[group][i];
#pragma unroll
            for (int lanes = kQuad; lanes < kWarpSize; lanes *= 2) {
                sum += __shfl_xor_sync(kFullWarp, sum, lanes);
            }
            const int64_t key = first_key + group * kKeyGroup + 2 * lane_of_quad() + i;
            if (quad_of_lane() == group && key < end) {
                const float before = is_first ? 0.0f : output[key];
                output[key] = before + sum;
            }
        }
    }
}

// Grid (N, G, B).
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kWarps* kWarpSize, 2) observation_votes(const ObservationParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const ObservedChunk<T> chunk(params);
    const int64_t end = min(chunk.first + kChunkKeys, chunk.n - params.window + chunk.silent);
    if (chunk.first >= end) {
        return;
    }
    const int warp = warp_index();
    const auto queries = ObservationShared<T, Tile>::queries(params);
    const auto weights = ObservationShared<T, Tile>::row_values(params);
    float* output =
        params.votes + (static_cast<int64_t>(blockIdx.z) * params.kv_heads + blockIdx.y) * params.prompt_length;
    Tile keys = ObservationShared<T, Tile>::key_tile(params, warp);

    for (int first_row = 0; first_row < chunk.rows; first_row += params.block_rows) {
        stage_queries<T, Tile>(params, chunk, first_row);
        stage_weights(params, chunk, first_row, weights);
        __syncthreads();
        for (int64_t key = chunk.first + warp * Tile::kKeys; key < end; key += Tile::kWarps * Tile::kKeys) {
            keys.load(chunk.tile(params, key));
            float votes[Tile::kGroups][2] = {};
            for (int tile = 0; tile < params.block_rows / kQueryTile; ++tile) {
                float logits[Tile::kGroups][4] = {};
                keys.multiply(queries, tile, logits);
                const int upper = tile * kQueryTile + quad_of_lane();
                add_probabilities(votes, logits, weights[upper], weights[upper + kKeyGroup], params.scale);
            }
            store_votes(votes, output, key, end, first_row == 0);
        }
        __syncthreads();
    }
}

}  // namespace kvc
