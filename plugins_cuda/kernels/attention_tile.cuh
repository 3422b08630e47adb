// Shared by the warps of the attention kernel, on tensor cores and without: the slots that a tile reads, how scores
// become weights, and the layout of results for the merge.
//
// A warp takes tiles of 16 tokens and 8 query heads of one group. Where a group has more than 8 heads, two warps take
// the same tokens.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"
#include "kernels/stored_vector.cuh"

namespace kvc {

inline constexpr int kTileTokens = 16;
inline constexpr int kWarpHeads = 8;

// The distance of two heads of a warp's output in shared memory: 8 floats past a multiple of the 32 banks, so that at
// most two of a warp's 128-bit stores share a bank.
template <int kHeadSize>
inline constexpr int kOutputStride = kHeadSize + 8;

// Floats of a warp's output.
template <int kHeadSize>
inline constexpr int kWarpOutputs = kWarpHeads * kOutputStride<kHeadSize>;

// The thread's and the warp's number, for code outside the loop over tiles. The compiler cannot reuse an earlier value,
// so it computes there what depends on them: kept over the loop, it would take registers that the loop needs. The
// warp's number comes from its first lane: then the compiler knows that it is the same in all lanes.
__device__ __forceinline__ int thread_anew() { return __shfl_xor_sync(kFullWarp, static_cast<int>(threadIdx.x), 0); }
__device__ __forceinline__ int warp_anew() { return __shfl_sync(kFullWarp, warp_index(), 0); }

// The keys and values of one KV head, and which of them a part of a split reads.
template <class T>
struct TokenRows {
    VectorTable keys;          // [C,.]
    VectorTable values;        // [C,.]
    SharedSpan<int32_t> list;  // slots of the tokens `first` and up
    bool listed;               // false: there is no list, token i is slot i
    int first;
    int end;        // the tokens of the part end here
    int head_size;  // D

    // Slot of a token. A token past the end reads the last token again, with weight 0.
    __device__ __forceinline__ int slot(int token) const {
        const int inside = token < end ? token : end - 1;
        return listed ? list[inside - first] : inside;
    }

    // A token's row of `table` (keys or values) from a channel on. Within a KV head offsets are below 2^20 * 256 floats.
    template <VectorFormat kFormat>
    __device__ __forceinline__ const char* row(const VectorTable& table, int token, int channel) const {
        return row_of_slot<kFormat>(table, slot(token), channel);
    }
    template <VectorFormat kFormat>
    __device__ __forceinline__ const char* row_of_slot(const VectorTable& table, int slot, int channel) const {
        const auto element = static_cast<uint32_t>(slot * head_size + channel);
        constexpr uint32_t kBytes = kFormat == VectorFormat::kExact ? sizeof(T) : 1;
        const uint32_t offset = kFormat == VectorFormat::kInt4 ? element / 2 : element * kBytes;
        return static_cast<const char*>(table.codes) + offset;
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

// 2^(score - maximum): scores are in units of log 2. A maximum of -inf counts as 0: no finite score was seen yet, and
// -inf - -inf would be NaN.
__device__ __forceinline__ float softmax_weight(float score, float maximum) {
    return exp2f(score - (maximum == -INFINITY ? 0.0f : maximum));
}

}  // namespace kvc
