// Scores and weights of a tile of 16 tokens and 8 query heads, as the lanes of a warp hold them between the two products of
// attention_tensor_core.cuh: lane 4 group + t has the scores of tokens group and group + 8 for heads 2t and 2t + 1.
//
// Deterministic: fixed trees over the 8 lanes that hold the same heads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/mma.cuh"
#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"

namespace kvc {

// Elements 0 or 1 of the pairs in two registers, as one register: the bytes that __byte_perm takes.
inline constexpr uint32_t kLowerHalves = 0x5410, kUpperHalves = 0x7632;

// P^T fragment half [tokens 2t, 2t+1][head group] from words [token group][heads 2t, 2t+1] (lane = 4 group + t).
__device__ __forceinline__ uint32_t transpose_weights(uint32_t word, int group, int t) {
    const uint32_t even = __shfl_sync(kFullWarp, word, 8 * t + group / 2);
    const uint32_t odd = __shfl_sync(kFullWarp, word, 8 * t + 4 + group / 2);
    return __byte_perm(even, odd, group % 2 == 0 ? kLowerHalves : kUpperHalves);
}

// Weights as B fragments of P^T: the rounded ones, and the remainders of the rounding.
struct WeightFragments {
    uint32_t rounded[2];
    uint32_t rest[2];

    // Of tokens group + 8 half: weight a of head 2t, and b of head 2t + 1.
    template <class T>
    __device__ __forceinline__ void set(int half, float a, float b, int group, int t) {
        const uint32_t pair = pack_pair<T>(a, b);
        T numbers[2];
        memcpy(numbers, &pair, sizeof numbers);
        rounded[half] = transpose_weights(pair, group, t);
        rest[half] = transpose_weights(pack_pair<T>(a - to_float(numbers[0]), b - to_float(numbers[1])), group, t);
    }
};

// Scores of tokens past the end count for nothing; `token` is the lane's first.
__device__ __forceinline__ void leave_out(float (&scores)[4], int token, int end) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        scores[e] = token < end ? scores[e] : -INFINITY;
        scores[2 + e] = token + 8 < end ? scores[2 + e] : -INFINITY;
    }
}

// Over the 8 lanes that hold the same heads.
__device__ __forceinline__ float maximum_groups(float value) {
#pragma unroll
    for (int step = 4; step < kWarpSize; step *= 2) {
        value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
    }
    return value;
}
__device__ __forceinline__ float sum_groups(float value) {
#pragma unroll
    for (int step = 4; step < kWarpSize; step *= 2) {
        value += __shfl_xor_sync(kFullWarp, value, step);
    }
    return value;
}

// The maxima of both heads of two tiles, step by step: their shuffles are under way together.
__device__ __forceinline__ void find_maxima(const float (&scores)[2][4], float (&maxima)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        maxima[i / 2][i % 2] = fmaxf(scores[i / 2][i % 2], scores[i / 2][2 + i % 2]);
    }
#pragma unroll
    for (int step = 4; step < kWarpSize; step *= 2) {
        float others[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            others[i] = __shfl_xor_sync(kFullWarp, maxima[i / 2][i % 2], step);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            maxima[i / 2][i % 2] = fmaxf(maxima[i / 2][i % 2], others[i]);
        }
    }
}

}  // namespace kvc
