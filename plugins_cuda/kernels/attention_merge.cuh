// Merges the warps' parts of one split into its result, and the splits of a row into its output.
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
    SharedSpan<SoftmaxPart> parts;  // [warp][8 heads]
    SharedSpan<float> outputs;      // [warp][warp_floats]: [8 heads][kOutputStride]; then [split][head]: weights
    int warp_floats;
    SharedSpan<int> is_last;  // [1]

    __device__ __forceinline__ SharedSpan<SoftmaxPart> parts_of(int warp) const {
        return parts.part(warp * kWarpHeads, kWarpHeads);
    }
    __device__ __forceinline__ SharedSpan<float> outputs_of(int warp) const {
        return outputs.part(warp * warp_floats, warp_floats);
    }
};
static_assert(kAttentionWarps * kWarpOutputs<64> >= kMostSplits * KVC_LARGEST_GROUP);

// Results of the splits of one row and KV head.
struct SplitResults {
    SoftmaxPart* parts;  // [split][head of the group]
    float* outputs;      // [split][head of the group][D], to be divided by the sum
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
    __device__ __forceinline__ TileRange tiles(int warp, int first, int end) const {
        return {first + token_tile(warp) * kTileTokens, token_tile(kAttentionWarps) * kTileTokens, end};
    }
};

// The block's result from those of its warps, after a barrier; store(head, d, sums, part) takes four channels at a time.
// Every thread weighs the warps for itself: that costs less than the barrier that shared weights would need. With kOneTile a
// group has 8 heads at most, and a thread reads the outputs of all warps before it knows their weights: 32 registers.
template <int kHeadSize, bool kOneTile = false, class Store>
__device__ __forceinline__ void merge_warps(const MergeBuffers& buffers, int group, int head_size, Store&& store) {
    constexpr int kVectors = kHeadSize / 4;
    const WarpShare share(kOneTile ? kWarpHeads : group);
    const int thread = thread_anew();
    for (int item = thread; item < group * kVectors; item += kAttentionThreads) {
        const int head = item / kVectors, d = item % kVectors * 4;
        if (d >= head_size) {
            continue;
        }
        const int first = kOneTile ? 0 : head / kWarpHeads, row = head - first * kWarpHeads;  // warp, and place in it
        const auto output_of = [&](int warp) {
            const int at = warp * buffers.warp_floats + row * kOutputStride<kHeadSize> + d;
            return buffers.outputs.cast<float4>()[at / 4];
        };
        float4 ahead[kOneTile ? kAttentionWarps : 1];
        if constexpr (kOneTile) {
#pragma unroll
            for (int i = 0; i < kAttentionWarps; ++i) {
                ahead[i] = output_of(i);
            }
        }
        SoftmaxPart parts[kAttentionWarps], total{-INFINITY, 0.0f};
#pragma unroll
        for (int i = 0; i < kAttentionWarps; ++i) {
            const int warp = first + i * share.head_tiles;
            parts[i] = warp < kAttentionWarps ? buffers.parts[warp * kWarpHeads + row] : SoftmaxPart{-INFINITY, 0.0f};
            total.maximum = fmaxf(total.maximum, parts[i].maximum);
        }
        float sums[4] = {};
#pragma unroll
        for (int i = 0; i < kAttentionWarps; ++i) {
            const int warp = first + i * share.head_tiles;
            const float weight = softmax_weight(parts[i].maximum, total.maximum);
            total.sum += weight * parts[i].sum;
            if (warp < kAttentionWarps) {
                float4 values;
                if constexpr (kOneTile) {
                    values = ahead[i];
                } else {
                    values = output_of(warp);
                }
                sums[0] += weight * values.x;
                sums[1] += weight * values.y;
                sums[2] += weight * values.z;
                sums[3] += weight * values.w;
            }
        }
        store(head, d, sums, total);
    }
}

// Writes the output [heads of the group, D] of a row of one split, after a barrier.
template <int kHeadSize, bool kOneTile = false, class T>
__device__ __forceinline__ void write_merged_warps(const MergeBuffers& buffers, int group, int head_size, T* output) {
    merge_warps<kHeadSize, kOneTile>(
        buffers, group, head_size, [&](int head, int d, const float (&sums)[4], const SoftmaxPart& total) {
            const float scale = 1.0f / total.sum;
            store_four(output + head * head_size + d,
                       {sums[0] * scale, sums[1] * scale, sums[2] * scale, sums[3] * scale});
        });
}

// Writes `count` zeros, a multiple of 4: the output of a row without entries.
template <int kThreads, class T>
__device__ __forceinline__ void write_zeros(T* to, int count) {
    for (int i = static_cast<int>(threadIdx.x) * 4; i < count; i += kThreads * 4) {
        store_four(to + i, {0.0f, 0.0f, 0.0f, 0.0f});
    }
}

// Counts this block as done. True in the last block of the row, which then sees everything that the others wrote.
__device__ __forceinline__ bool arrives_last(int32_t* arrivals, int splits, const MergeBuffers& buffers) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        buffers.is_last[0] = atomicAdd(arrivals, 1) == splits - 1;
        __threadfence();
    }
    __syncthreads();
    return buffers.is_last[0] != 0;
}

// Weight of every split in the output of every head, as [split][head of the group] in buffers.outputs.
__device__ __forceinline__ void weigh_splits(const SplitResults& results, int splits, int group,
                                             const MergeBuffers& buffers, int thread) {
    constexpr int kSplitsPerLane = kMostSplits / kWarpSize;
    const int lane = thread % kWarpSize;
    for (int head = thread / kWarpSize; head < group; head += kAttentionWarps) {
        SoftmaxPart parts[kSplitsPerLane];
        float maximum = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kSplitsPerLane; ++i) {
            const int split = i * kWarpSize + lane;
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
            const int split = i * kWarpSize + lane;
            buffers.outputs[split * KVC_LARGEST_GROUP + head] = softmax_weight(parts[i].maximum, maximum) / sum;
        }
    }
}

// Splits whose outputs a thread loads at a time: it loads the first of them before it knows their weights.
inline constexpr int kSplitsAhead = 8;

// Four channels of one head in splits `first` and up; item counts them as [head][channel / 4].
template <int kHeadSize>
__device__ __forceinline__ void load_splits(const SplitResults& results, int splits, int first, int group,
                                            int head_size, int item, float4 (&values)[kSplitsAhead]) {
    constexpr int kVectors = kHeadSize / 4;
    const int head = item / kVectors, d = item % kVectors * 4;
    if (head >= group || d >= head_size) {
        return;
    }
#pragma unroll
    for (int i = 0; i < kSplitsAhead; ++i) {
        if (first + i < splits) {
            const int64_t at = (int64_t{first + i} * group + head) * head_size + d;
            values[i] = platform::load_vector_of<float4>(results.outputs + at);
        }
    }
}

// Writes the output [heads of the group, D] of a row from the results of its splits; only the last block calls it.
template <int kHeadSize, class T>
__device__ __forceinline__ void merge_splits(const SplitResults& results, int splits, int group, int head_size,
                                             const MergeBuffers& buffers, T* output) {
    constexpr int kVectors = kHeadSize / 4;
    const int thread = thread_anew();
    float4 values[kSplitsAhead] = {};  // else the values of another split would take registers over the tiles
    load_splits<kHeadSize>(results, splits, 0, group, head_size, thread, values);
    weigh_splits(results, splits, group, buffers, thread);
    __syncthreads();
    for (int item = thread; item < group * kVectors; item += kAttentionThreads) {
        const int head = item / kVectors, d = item % kVectors * 4;
        if (d >= head_size) {
            continue;
        }
        float sums[4] = {};
        for (int first = 0; first < splits; first += kSplitsAhead) {
            if (first > 0 || item >= kAttentionThreads) {
                load_splits<kHeadSize>(results, splits, first, group, head_size, item, values);
            }
#pragma unroll
            for (int i = 0; i < kSplitsAhead; ++i) {
                if (first + i < splits) {
                    const float weight = buffers.outputs[(first + i) * KVC_LARGEST_GROUP + head];
                    sums[0] += weight * values[i].x;
                    sums[1] += weight * values[i].y;
                    sums[2] += weight * values[i].z;
                    sums[3] += weight * values[i].w;
                }
            }
        }
        store_four(output + int64_t{head} * head_size + d, sums);
    }
}

}  // namespace kvc
