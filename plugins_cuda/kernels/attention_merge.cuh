// From the warps' parts of one split to its result, and from the splits of a row to its output.
//
// Parts are softmax sums over different tokens, each relative to its own maximum (the log-sum-exp merge). They are
// added in ascending order of warps and of splits, whichever finished first.
//
// The last block of a row to arrive merges its splits: each block writes its partial results, makes them visible by
// __threadfence and counts itself; the block that counts last reads them all. So one launch is enough, and the order of
// arrival decides which block merges, but not the result.
#pragma once

#include "kernels/attention_tile.cuh"
#include "kvc/limits.h"

namespace kvc {

inline constexpr int kAttentionWarps = 8;
inline constexpr int kAttentionThreads = kAttentionWarps * kWarpSize;
inline constexpr int kMostSplits = 64;

// Shared memory of one block.
struct MergeBuffers {
    SharedSpan<SoftmaxPart> parts;   // [warp][8 heads]
    SharedSpan<float> weights;       // [warp][8 heads]
    SharedSpan<SoftmaxPart> totals;  // [head of the group]
    SharedSpan<float> outputs;       // [warp][8 heads][kBlockStride]; then [split][head of the group]: weights
    SharedSpan<int> splits;          // [1]: of the row. Over the loop of tiles every register counts
    SharedSpan<int> is_last;         // [1]
};
inline constexpr int kWarpOutputs = kWarpHeads * kBlockStride;
static_assert(kAttentionWarps * kWarpOutputs >= kMostSplits * KVC_LARGEST_GROUP);

// Results of the splits of one row and KV head.
struct SplitResults {
    const SoftmaxPart* parts;  // [split][head of the group]
    const float* outputs;      // [split][head of the group][D], to be divided by the sum
};

// Four elements of an output row; d is a multiple of 4.
template <class T>
__device__ __forceinline__ void store_four(T* to, const float (&values)[4]) {
    struct alignas(4 * sizeof(T)) Four {
        T values[4];
    } four = {from_float<T>(values[0]), from_float<T>(values[1]), from_float<T>(values[2]), from_float<T>(values[3])};
    platform::store_vector_of(to, four);
}

// How the warps of a block share a group: all of them take its heads and different tiles, or, for more than 8 heads,
// warps 2i and 2i+1 take the same tiles and 8 heads each.
struct WarpShare {
    int head_tiles;  // 1 or 2

    __device__ __forceinline__ explicit WarpShare(int group) : head_tiles(group > kWarpHeads ? 2 : 1) {}
    __device__ __forceinline__ int head_tile(int warp) const { return head_tiles == 2 ? warp % 2 : 0; }
    __device__ __forceinline__ int token_tile(int warp) const { return head_tiles == 2 ? warp / 2 : warp; }
    __device__ __forceinline__ TileRange tiles(int first, int end) const {
        return {first + token_tile(warp_anew()) * kTileTokens, token_tile(kAttentionWarps) * kTileTokens, end};
    }
};

// Weight of every warp's part, and the totals of every head. Ends before the barrier that its reader needs.
__device__ __forceinline__ void weigh_warps(const MergeBuffers& buffers, const WarpShare& share) {
    __syncthreads();
    const int thread = thread_anew();
    if (thread >= kAttentionWarps * kWarpHeads) {
        return;
    }
    const int warp = thread / kWarpHeads, head = thread % kWarpHeads, tile = share.head_tile(warp);
    float maximum = -INFINITY;
    for (int other = tile; other < kAttentionWarps; other += share.head_tiles) {
        maximum = fmaxf(maximum, buffers.parts[other * kWarpHeads + head].maximum);
    }
    buffers.weights[thread] = softmax_weight(buffers.parts[thread].maximum, maximum);
    if (warp == tile) {
        float sum = 0.0f;
        for (int other = tile; other < kAttentionWarps; other += share.head_tiles) {
            const SoftmaxPart part = buffers.parts[other * kWarpHeads + head];
            sum += softmax_weight(part.maximum, maximum) * part.sum;
        }
        buffers.totals[thread] = {maximum, sum};
    }
}

// Channels 64 block .. + 63 of all heads, summed over the warps; store(head, d, sums) takes four at a time.
template <class Store>
__device__ __forceinline__ void add_warps(const MergeBuffers& buffers, const WarpShare& share, int group, int block,
                                          int head_size, Store&& store) {
    constexpr int kVectors = kBlockChannels / 4;
    for (int item = thread_anew(); item < group * kVectors; item += kAttentionThreads) {
        const int head = item / kVectors, channel = item % kVectors * 4, d = block * kBlockChannels + channel;
        if (d >= head_size) {
            continue;
        }
        float sums[4] = {};
        for (int warp = head / kWarpHeads; warp < kAttentionWarps; warp += share.head_tiles) {
            const int row = warp * kWarpHeads + head % kWarpHeads;
            const float weight = buffers.weights[row];
            const float4 values = buffers.outputs.cast<float4>()[(row * kBlockStride + channel) / 4];
            sums[0] += weight * values.x;
            sums[1] += weight * values.y;
            sums[2] += weight * values.z;
            sums[3] += weight * values.w;
        }
        store(head, d, sums);
    }
}

// All channels of the block's result, after weigh_warps.
template <int kHeadSize, class Warp, class Store>
__device__ __forceinline__ void merge_warps(const Warp& warp, const MergeBuffers& buffers, const WarpShare& share,
                                            int group, int head_size, Store&& store) {
#pragma unroll
    for (int block = 0; block < kHeadSize / kBlockChannels; ++block) {
        warp.store_block(block, buffers.outputs.part(warp_anew() * kWarpOutputs, kWarpOutputs));
        __syncthreads();
        add_warps(buffers, share, group, block, head_size, store);
        __syncthreads();
    }
}

// Counts this block as done. True in the last block of the row, which then sees what all the others have written.
__device__ __forceinline__ bool arrives_last(int32_t* arrivals, const MergeBuffers& buffers) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        buffers.is_last[0] = atomicAdd(arrivals, 1) == buffers.splits[0] - 1;
        __threadfence();
    }
    __syncthreads();
    return buffers.is_last[0] != 0;
}

// Weight of every split in the output of every head, as [split][head of the group] in buffers.outputs.
__device__ __forceinline__ void weigh_splits(const SplitResults& results, int splits, int group,
                                             const MergeBuffers& buffers) {
    constexpr int kSplitsPerLane = kMostSplits / kWarpSize;
    for (int head = warp_anew(); head < group; head += kAttentionWarps) {
        SoftmaxPart parts[kSplitsPerLane];
        float maximum = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kSplitsPerLane; ++i) {
            const int split = i * kWarpSize + lane_index();
            parts[i] = split < splits ? results.parts[int64_t{split} * group + head] : SoftmaxPart{-INFINITY, 0.0f};
            maximum = fmaxf(maximum, parts[i].maximum);
        }
        maximum = warp_max(maximum);
#pragma unroll
        for (int i = 0; i < kSplitsPerLane; ++i) {
            sum += softmax_weight(parts[i].maximum, maximum) * parts[i].sum;
        }
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < kSplitsPerLane; ++i) {
            const int split = i * kWarpSize + lane_index();
            buffers.outputs[split * KVC_LARGEST_GROUP + head] = softmax_weight(parts[i].maximum, maximum) / sum;
        }
    }
}

// The output [heads of the group, D] of a row from the results of its splits; for the last block alone.
template <int kHeadSize, class T>
__device__ __forceinline__ void merge_splits(const SplitResults& results, int group, int head_size,
                                             const MergeBuffers& buffers, T* output) {
    constexpr int kVectors = kHeadSize / 4;
    const int splits = buffers.splits[0];
    weigh_splits(results, splits, group, buffers);
    __syncthreads();
    for (int item = thread_anew(); item < group * kVectors; item += kAttentionThreads) {
        const int head = item / kVectors, d = item % kVectors * 4;
        if (d >= head_size) {
            continue;
        }
        float sums[4] = {};
#pragma unroll 8
        for (int split = 0; split < splits; ++split) {
            const int64_t at = (int64_t{split} * group + head) * head_size + d;
            const auto values = platform::load_vector_of<float4>(results.outputs + at);
            const float weight = buffers.outputs[split * KVC_LARGEST_GROUP + head];
            sums[0] += weight * values.x;
            sums[1] += weight * values.y;
            sums[2] += weight * values.z;
            sums[3] += weight * values.w;
        }
        store_four(output + int64_t{head} * head_size + d, sums);
    }
}

}  // namespace kvc
