// What the warps of the attention kernel share, on tensor cores and without: which slots a tile reads, how scores
// become weights, and how results are laid out for the merge.
//
// A warp takes tiles of 16 tokens and 8 query heads of one group. Where a group has more than 8 heads, two warps take
// the same tokens, and the second finds them in the L1 cache.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

namespace kvc {

inline constexpr int kTileTokens = 16;
inline constexpr int kWarpHeads = 8;

// Channels that are merged at a time, and the distance of two heads in shared memory: 8 floats past a multiple of the
// 32 banks, so that at most two of a warp's 128-bit stores share a bank.
inline constexpr int kBlockChannels = 64;
inline constexpr int kBlockStride = kBlockChannels + 8;

// The thread's number, for code in a loop over splits. To the compiler it is news each time, so what follows from it is
// computed again: kept over the loop, it would take registers that the keys and values of a tile need.
__device__ __forceinline__ int thread_anew() { return __shfl_xor_sync(kFullWarp, static_cast<int>(threadIdx.x), 0); }
__device__ __forceinline__ int warp_anew() { return thread_anew() / kWarpSize; }

// The keys and values of one KV head, and which of them a split reads.
template <class T>
struct TokenRows {
    const T* keys;        // [C,D]
    const T* values;      // [C,D]
    const int32_t* list;  // slot of each token; null: token i is slot i
    int end;              // the tokens of the split end here
    int head_size;        // D

    // Slot of a token. What reaches past the end reads the last token again, with weight 0.
    __device__ __forceinline__ int slot(int token) const {
        const int inside = token < end ? token : end - 1;
        return list == nullptr ? inside : list[inside];
    }

    // Element offset of a slot's row within its KV head: below 2^20 * 256.
    __device__ __forceinline__ uint32_t offset(int slot) const {
        return static_cast<uint32_t>(slot) * static_cast<uint32_t>(head_size);
    }
};

// The tiles of one warp, by their first tokens: first, first + step, ... below end.
struct TileRange {
    int first;
    int step;
    int end;
};

// Maximum and sum of the softmax over some tokens, the sum relative to the maximum; (-inf, 0) over none.
struct SoftmaxPart {
    float maximum;
    float sum;
};

// exp(score - maximum). A maximum of -inf counts as 0: no finite score was seen yet, and -inf - -inf would be NaN.
__device__ __forceinline__ float softmax_weight(float score, float maximum) {
    return expf(score - (maximum == -INFINITY ? 0.0f : maximum));
}

}  // namespace kvc
