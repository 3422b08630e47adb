// Chooses the prompt tokens to keep: max-pooled votes, the best of them, the window; as ascending positions.
//
// Source: RocketKV, arXiv 2502.14051, algorithm 1 (SnapKV++), steps "max-pool" and "top-k". Votes are summed over the
// window and the group already (observation_votes.cuh).
//
//   pool_votes      votes float [B,G,S] -> keys uint32 [B,G,S]: the order key of the best vote within (ks-1)/2, clipped
//                   to 0..n-V-1; a NaN vote makes its whole neighbourhood NaN, which ranks below everything.
//   select_prompt   keys -> indices int32 [B,G,C], cache_lengths int64 [B]: the budget - V best (key descending,
//                   position ascending), ascending; then n-V..n-1; then -1. Rows of n <= budget keep 0..n-1.
//
// Bytes per row and KV head of n > budget: pool_votes reads 4·n·(1 + (ks-1)/outputs) and writes 4·n, outputs being a
// tile of 2048 (ks < 1024) or 8192 votes less its margins; select_prompt reads 6·4·n (radix_select.cuh) and writes 4·C.
// Pooling costs 2·log2(ks) shared accesses a vote, with or without plateaus.
//
// Two launches, since the first is parallel over the prompt and the second one block per row and KV head: pooled by
// that one block, a prompt of 128K tokens at batch 1 would keep 8 SMs busy for as long as the selection itself takes.
// Where blocks form clusters, cluster_select_prompt.cuh stands for the second.
//
// Determinism: maxima and integer sums only; the selection is exact (radix_select.cuh).
#pragma once

#include <cstdint>

#include "kernels/dependent_launch.cuh"
#include "kernels/emit_selected.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"
#include "kernels/radix_select.cuh"
#include "kernels/row_lengths.cuh"
#include "kernels/shared.cuh"

namespace kvc {

struct PoolSelectParams {
    int32_t batch;                  // rows
    int32_t kv_heads;               // G
    int32_t window;                 // W
    int32_t pool_kernel;            // ks, odd
    int64_t prompt_length;          // S
    int64_t prompt_budget;          // B
    int64_t capacity;               // C
    const float* votes;             // [B,G,S]; null where no row can exceed its budget, as is `keys`
    const int64_t* prompt_lengths;  // [B]
    const int64_t* window_lengths;  // [B]: V, the part of the window that votes and stays; null: all of it
    const int64_t* prompt_budgets;  // [B]: B of each row, clamped to V..prompt_budget; null: prompt_budget
    const int64_t* pool_kernels;    // [B]: ks of each row, clamped to 1..pool_kernel; null: pool_kernel
    int64_t key_stride;             // S or more, a multiple of 4: every row of keys starts at a vector
    uint32_t* keys;                 // [B,G,key_stride] scratch
    int64_t* cache_lengths;         // [B]
    int32_t* indices;               // [B,G,C]
};

// Votes of one tile of pool_votes: kPoolPerThread for each of its threads.
constexpr int kPoolPerThread = 8;

template <int kThreads>
constexpr int kPoolTile = kThreads * kPoolPerThread;

// Two tiles of keys: pool_tile reads one while it writes the other.
template <int kThreads>
constexpr size_t kPoolSharedBytes = 2 * sizeof(uint32_t) * kPoolTile<kThreads>;

constexpr int kSelectThreads = 1024;
constexpr int kSelectCopies = kWarpSize;

// Order of votes under torch's max-pooling: NaN above everything; no other vote has key 0.
__device__ __forceinline__ uint32_t pooling_key(float vote) { return vote != vote ? 0xffffffffu : order_key(vote); }

// Doubling: every step joins two neighbouring maxima, which then cover twice as many votes from their own on; the last
// two overlap until they cover the kernel. `exchange` holds two tiles, written in turn: one barrier a step.
template <int kThreads>
__device__ __forceinline__ void pool_tile(uint32_t (&values)[kPoolPerThread], int32_t pool_kernel,
                                          SharedSpan<uint32_t> exchange) {
    constexpr int32_t kTile = kPoolTile<kThreads>;
    const int32_t thread = threadIdx.x;
    int32_t half = 0;
    int32_t covered = 1;
    while (covered < pool_kernel) {
        const int32_t step = pool_kernel - covered < covered ? pool_kernel - covered : covered;
#pragma unroll
        for (int32_t j = 0; j < kPoolPerThread; ++j) exchange[half + thread + j * kThreads] = values[j];
        __syncthreads();
#pragma unroll
        for (int32_t j = 0; j < kPoolPerThread; ++j) {
            const int32_t other = thread + j * kThreads + step;
            const uint32_t value = other < kTile ? exchange[half + other] : 0;
            values[j] = values[j] > value ? values[j] : value;
        }
        covered += step;
        half = kTile - half;
    }
}

// Grid (tiles of kPoolTile - (ks - 1) outputs, G, B).
template <int kThreads>
__global__ void __launch_bounds__(kThreads) pool_votes(const PoolSelectParams params) {
    start_next_launch();
    wait_for_previous_launch();
    const int32_t n = clamped_length(params.prompt_lengths, blockIdx.z, params.prompt_length);
    const int32_t window = window_length(params.window_lengths, blockIdx.z, params.window);
    const int32_t votes_count = n - window;
    const int64_t budget = row_budget(params.prompt_budgets, blockIdx.z, params.prompt_budget, window);
    const int32_t pool_kernel = row_pool_kernel(params.pool_kernels, blockIdx.z, params.pool_kernel);
    const int32_t outputs = kPoolTile<kThreads> - (params.pool_kernel - 1);
    const int32_t first_output = static_cast<int32_t>(blockIdx.x) * outputs;
    if (n <= budget || first_output >= votes_count) return;

    const int64_t head = static_cast<int64_t>(blockIdx.z) * params.kv_heads + blockIdx.y;
    const float* votes = params.votes + head * params.prompt_length;
    uint32_t values[kPoolPerThread];
#pragma unroll
    for (int32_t j = 0; j < kPoolPerThread; ++j) {
        // The row's kernel is odd: an even number is the odd one below it.
        const int32_t position =
            first_output - (pool_kernel - 1) / 2 + static_cast<int32_t>(threadIdx.x) + j * kThreads;
        values[j] = position >= 0 && position < votes_count ? pooling_key(votes[position]) : 0;
    }
    pool_tile<kThreads>(values, (pool_kernel - 1) / 2 * 2 + 1, dynamic_shared<uint32_t>(0, 2 * kPoolTile<kThreads>));
    uint32_t* keys = params.keys + head * params.key_stride;
#pragma unroll
    for (int32_t j = 0; j < kPoolPerThread; ++j) {
        const int32_t output = static_cast<int32_t>(threadIdx.x) + j * kThreads;
        const int32_t position = first_output + output;
        if (output < outputs && position < votes_count) keys[position] = values[j] == 0xffffffffu ? 0 : values[j];
    }
}

// The positions that the votes choose, into the first `quota` slots of `indices`.
template <int kThreads>
__device__ __forceinline__ void select_by_votes(const uint32_t* keys, int32_t count, int32_t quota, int32_t* indices) {
    KVC_SHARED(uint32_t, histogram, kHistogramWords<kSelectCopies>);
    KVC_SHARED(uint32_t, sums, kRadixBins);
    KVC_SHARED(int32_t, shares, kEmissionWords<kThreads>);
    const auto key_at = [keys](int32_t i) { return keys[i]; };
    const auto emit = [indices](int32_t position, int32_t slot, int32_t) { indices[slot] = position; };
    clear_histogram<kThreads, kSelectCopies>(histogram);
    __syncthreads();
    const auto keys_read = memory_keys<kThreads>(count, key_at);
    const Threshold threshold =
        find_threshold<kThreads, kSelectCopies>(keys_read, quota, kAllPasses, UnitWeight(), histogram, sums);
    emit_ascending<kThreads>(keys_read, threshold, UnitWeight(), shares, emit);
}

// The tokens that a row keeps: those that its votes choose, then its window; all of them within the budget.
struct KeptTokens {
    int32_t n;
    int32_t kept;
    int32_t chosen;  // of the first `votes` tokens; 0 where there is nothing to choose
    int32_t votes;

    __device__ __forceinline__ KeptTokens(const PoolSelectParams& params, int64_t row) {
        n = clamped_length(params.prompt_lengths, row, params.prompt_length);
        const int32_t window = window_length(params.window_lengths, row, params.window);
        const int64_t budget = row_budget(params.prompt_budgets, row, params.prompt_budget, window);
        kept = static_cast<int32_t>(n < budget ? n : budget);
        chosen = kept < n ? kept - window : 0;
        votes = n - window;
    }

    // The slots behind the chosen ones, by `threads` threads.
    __device__ __forceinline__ void write_rest(int32_t* indices, int64_t capacity, int32_t thread,
                                               int32_t threads) const {
#pragma unroll 1
        for (int64_t slot = chosen + thread; slot < capacity; slot += threads) {
            indices[slot] = slot < kept ? static_cast<int32_t>(n - kept + slot) : -1;
        }
    }
};

// Grid (G, B).
template <int kThreads>
__global__ void __launch_bounds__(kThreads) select_prompt(const PoolSelectParams params) {
    start_next_launch();
    wait_for_previous_launch();
    const KeptTokens of(params, blockIdx.y);
    const int64_t head = static_cast<int64_t>(blockIdx.y) * params.kv_heads + blockIdx.x;
    int32_t* indices = params.indices + head * params.capacity;
    if (of.chosen > 0) {
        select_by_votes<kThreads>(params.keys + head * params.key_stride, of.votes, of.chosen, indices);
    }
    of.write_rest(indices, params.capacity, static_cast<int32_t>(threadIdx.x), kThreads);
    if (blockIdx.x == 0 && threadIdx.x == 0) params.cache_lengths[blockIdx.y] = of.kept;
}

}  // namespace kvc
