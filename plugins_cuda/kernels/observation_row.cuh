// Shared by the kernels of the observation scores: parameters, a block's place in the prompt, the group's queries in
// shared memory, and the arithmetic of softmax statistics.
//
// Logits are measured in units of log 2 (the scale log2(e) / sqrt(D) replaces 1 / sqrt(D)): a probability is exp2(x -
// maximum) / sum. Maximum and sum are carried apart instead of as a log-sum-exp, because x - maximum keeps the
// precision of x, whereas the rounding of an lse near 100 is 2^-17 of the probability.
//
// A statistic is float2 {maximum, sum of exp2(x - maximum)}; over no keys it is {-inf, 0}. The maximum skips NaN, but
// the sum cannot: it is NaN exactly where torch.softmax gives NaN because of a NaN or +inf among the logits.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#include "kernels/observation_tiles.cuh"
#include "kernels/row_lengths.cuh"
#include "kernels/shared.cuh"

namespace kvc {

// Keys of one block. A constant, so that partial results and their order depend on the length of the prompt alone.
constexpr int kChunkKeys = 512;

// B batch, H query heads, G KV heads, D head size, W window, S prompt length, N = ceil(S / kChunkKeys) chunks.
template <class T>
struct ObservationParams {
    const T* q_window;              // [B,H,W,D]: row i is the query at n-W+i
    const T* k;                     // [B,G,S,D] by the strides
    const int64_t* prompt_lengths;  // [B]: n, clamped to 0..S
    const int64_t* window_lengths;  // [B]: the last V rows of the window vote, clamped to 1..W; null: all
    const int64_t* prompt_budgets;  // [B]: tokens that rows keep, if they have budgets of their own; null: one for all
    float2* partials;               // [B,H,W,N]: statistic of a query row over a chunk of keys
    float2* weights;                // [B,H,W]: maximum and 1 / sum of a query row over all its keys
    float* votes;                   // [B,G,S]: entries before n-V are written
    int64_t prompt_length;          // S
    int64_t prompt_budget;          // rows with n <= their budget get no votes
    int64_t kv_stride_batch;        // elements, as the next two
    int64_t kv_stride_head;
    int64_t kv_stride_token;
    int64_t chunks;      // N
    int32_t batch;       // B
    int32_t heads;       // H
    int32_t kv_heads;    // G
    int32_t head_size;   // D
    int32_t window;      // W
    int32_t block_rows;  // query rows in shared memory at a time, a multiple of kQueryTile
    float scale;         // log2(e) / sqrt(D)
};

// Number of keys of batch row `b` if its keys get votes, else 0.
template <class T>
__device__ __forceinline__ int64_t observed_keys(const ObservationParams<T>& params, int64_t b) {
    const int64_t n = max(int64_t{0}, min(params.prompt_lengths[b], params.prompt_length));
    const int32_t window = window_length(params.window_lengths, b, params.window);
    const int64_t budget = row_budget(params.prompt_budgets, b, params.prompt_budget, window);
    return n > budget ? n : 0;
}

// The number of window rows that do not vote in batch row `b`: the first W-V rows.
template <class T>
__device__ __forceinline__ int32_t silent_rows(const ObservationParams<T>& params, int64_t b) {
    return params.window - window_length(params.window_lengths, b, params.window);
}

// Place of a block (chunk, KV head, batch row) of the grid. Keys are counted in 32 bits: S is at most 2^20, and the
// kernels have no registers to spare.
template <class T>
struct ObservedChunk {
    const T* queries;   // [H / G * W, D]
    const T* keys;      // [S, D] by the stride of tokens
    int64_t first_row;  // of `queries` among all [B,H,W]
    int32_t n;          // keys of the batch row, 0 if they get no votes
    int32_t first;      // key
    int32_t rows;       // H / G * W
    int32_t silent;     // rows of the window that do not vote: the first ones of every head

    __device__ __forceinline__ explicit ObservedChunk(const ObservationParams<T>& params) {
        const int64_t b = blockIdx.z, kv_head = blockIdx.y;
        rows = params.heads / params.kv_heads * params.window;
        first_row = (b * params.kv_heads + kv_head) * rows;
        queries = params.q_window + first_row * params.head_size;
        keys = params.k + b * params.kv_stride_batch + kv_head * params.kv_stride_head;
        n = static_cast<int32_t>(observed_keys(params, b));
        first = static_cast<int32_t>(blockIdx.x) * kChunkKeys;
        silent = silent_rows(params, b);
    }

    __device__ __forceinline__ KeyRows<T> tile(const ObservationParams<T>& params, int64_t first_key) const {
        return {keys, params.kv_stride_token, first_key, n - 1, params.head_size};
    }
};

// Dynamic shared memory of both passes: queries, then per query row a number of float2, then keys.
template <class T, class Tile>
struct ObservationShared {
    using Vector = typename Tile::Vector;

    static constexpr __host__ __device__ size_t query_bytes(int block_rows, int head_size) {
        return sizeof(Vector) * block_rows * Tile::query_vectors(head_size);
    }
    static constexpr __host__ __device__ size_t key_bytes(int head_size) {
        return sizeof(Vector) * Tile::kWarps * Tile::key_vectors(head_size);
    }
    static constexpr __host__ __device__ size_t bytes(int block_rows, int head_size) {
        return query_bytes(block_rows, head_size) + sizeof(float2) * Tile::kWarps * block_rows + key_bytes(head_size);
    }

    static __device__ __forceinline__ SharedSpan<Vector> queries(const ObservationParams<T>& params) {
        return dynamic_shared<Vector>(0, params.block_rows * Tile::query_vectors(params.head_size));
    }
    static __device__ __forceinline__ SharedSpan<float2> row_values(const ObservationParams<T>& params) {
        return dynamic_shared<float2>(query_bytes(params.block_rows, params.head_size),
                                      Tile::kWarps * params.block_rows);
    }
    static __device__ __forceinline__ Tile key_tile(const ObservationParams<T>& params, int warp) {
        const int vectors = Tile::key_vectors(params.head_size);
        const size_t offset = bytes(params.block_rows, params.head_size) - key_bytes(params.head_size);
        return Tile(dynamic_shared<Vector>(offset + sizeof(Vector) * warp * vectors, vectors), params.head_size);
    }
};

// Vector `vector` of a query row, zeros past D. A row past the last one reads the last row; a row that does not vote
// reads the first voting row of its head. Such a row is then always a copy of a row that counts.
template <class T, class Vector>
__device__ __forceinline__ Vector load_query(const ObservationParams<T>& params, const ObservedChunk<T>& chunk, int row,
                                             int vector) {
    const int channel = vector * kVectorWidth<T>;
    Vector result{};
    if (channel < params.head_size) {
        const int32_t last = min(row, chunk.rows - 1);
        const int64_t source = last + max(chunk.silent - last % params.window, 0);
        const uint4 raw = platform::load_16_bytes(chunk.queries + source * params.head_size + channel);
        memcpy(&result, &raw, sizeof raw);
    }
    return result;
}

// Query rows first..first + block_rows - 1 to shared memory; a barrier is needed before they are read.
template <class T, class Tile>
__device__ __forceinline__ void stage_queries(const ObservationParams<T>& params, const ObservedChunk<T>& chunk,
                                              int first) {
    using Vector = typename Tile::Vector;
    const auto queries = ObservationShared<T, Tile>::queries(params);
    const int vectors = Tile::query_vectors(params.head_size);
    const int pairs = params.block_rows / 2;
#pragma unroll 4
    for (int i = threadIdx.x; i < pairs * vectors; i += Tile::kWarps * kWarpSize) {
        const int pair = i / vectors, vector = i % vectors;
        const int row = pair / kKeyGroup * kQueryTile + pair % kKeyGroup;
        const auto upper = load_query<T, Vector>(params, chunk, first + row, vector);
        const auto lower = load_query<T, Vector>(params, chunk, first + row + kKeyGroup, vector);
        Tile::store_queries(queries, row, vector, params.head_size, upper, lower);
    }
}

// A finite number to subtract where no key has been seen, or only keys of logit -inf.
__device__ __forceinline__ float exponent_origin(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// The statistic of two sets of keys together.
__device__ __forceinline__ float2 merge_statistics(float2 a, float2 b) {
    const float maximum = fmaxf(a.x, b.x);
    const float origin = exponent_origin(maximum);
    return make_float2(maximum, a.y * exp2f(a.x - origin) + b.y * exp2f(b.x - origin));
}

}  // namespace kvc
