// Exact attention of one decode step over the entries that each row reads: the selected ones, or all of them.
//
// Source: RocketKV (arXiv 2502.14051), algorithm 2, last step; split over tokens and merged by log-sum-exp as in
// Flash-Decoding (Dao et al., 2023). Scores, softmax and sums are fp32, scores are divided by sqrt(D).
//
// Shapes: B rows, G KV heads of g = H / G query heads, k tokens read of C slots, D channels. Each key and value is read
// from memory once for its whole group.
// Bytes per row: 2 G k D s of keys and values (s bytes per element), 4 G k of slots where the row is sparse; several
// splits add 8 G splits (g D + 2 g) through L2. Flops: 4 H k D.
//
// Deterministic: splits and their borders follow from k alone (split_plan), tiles from the split, and every merge goes
// in a fixed order. So a row has the same bits alone and in any batch, and dense attention has those of a sparse step
// that reads everything: the same kernel, told so by null in place of a list.
//
// A NaN score, and a maximum that is infinite, make the output NaN, as torch.softmax does. A row without entries gets
// zeros.
#pragma once

#include <type_traits>

#include "kernels/attended_row.cuh"
#include "kernels/attention_fma.cuh"
#include "kernels/attention_merge.cuh"
#include "kernels/attention_tensor_core.cuh"
#include "kernels/dependent_launch.cuh"

namespace kvc {

// How the tokens of a row are divided among blocks.
struct SplitPlan {
    int splits;
    int tokens;  // of each split but the last
};

// A round: every warp of a block takes one tile. Splits are whole rounds. Up to two rounds a second block would save
// less time than the merge through global memory costs.
inline constexpr int kRoundTokens = kAttentionWarps * kTileTokens;
inline constexpr int kUnsplitTokens = 2 * kRoundTokens;

__device__ __forceinline__ SplitPlan split_plan(int count) {
    if (count <= kUnsplitTokens) {
        return {count == 0 ? 0 : 1, kUnsplitTokens};
    }
    constexpr int kGranule = kMostSplits * kRoundTokens;
    const int tokens = (count + kGranule - 1) / kGranule * kRoundTokens;
    return {(count + tokens - 1) / tokens, tokens};
}

// Scratch memory: results of the splits of a row, and how many of them have arrived.
struct AttentionScratch {
    int32_t* arrivals;   // [B,G]: zeros before the launch (written by the kernel that appends the token)
    SoftmaxPart* parts;  // [B,G,splits,g]
    float* outputs;      // [B,G,splits,g,D]
    int32_t splits;      // most splits of a row
};

template <class T>
struct SparseAttentionParams {
    const T* query;                // [B,H,D]
    const T* k_cache;              // [B,G,C,D]
    const T* v_cache;              // [B,G,C,D]
    const int64_t* cache_lengths;  // [B]: entries before the append
    const int32_t* indices;        // [B,G,index_stride]: slots that a sparse row reads, ascending; or null: none is
    T* output;                     // [B,H,D]
    AttentionScratch scratch;
    AttentionLimits limits;
    int64_t index_stride;
    int32_t batch;      // B
    int32_t kv_heads;   // G
    int32_t group;      // H / G
    int32_t head_size;  // D
};

template <class T, int kHeadSize>
using AttentionWarp = std::conditional_t<std::is_same_v<T, float>, FmaWarp<kHeadSize>, TensorCoreWarp<T, kHeadSize>>;

// Row and KV head of this block, as an index into [B,G].
template <class T>
__device__ __forceinline__ int64_t row_head(const SparseAttentionParams<T>& params) {
    return int64_t{blockIdx.y} * params.kv_heads + blockIdx.x;
}

// The split that a block is at, in shared memory: between two splits a thread keeps nothing in registers.
struct SplitTask {
    int split;
    int tokens;   // of each split but the last
    int count;    // tokens that the row reads
    int all;      // whether it reads all its entries
    uint32_t kv;  // row_head
    int group;    // and the sizes, which the compiler would otherwise keep what it derives from
    int head_size;
};

// The block's result from those of its warps; the output, if there is no other split or this one is the last to arrive.
template <int kHeadSize, class T, class Warp>
__device__ __forceinline__ void finish_split(const SparseAttentionParams<T>& params, const SplitTask& task,
                                             const Warp& warp, const MergeBuffers& buffers, const WarpShare& share) {
    const int group = task.group, size = task.head_size;
    const int64_t kv = task.kv;
    T* const output = params.output + kv * group * size;
    weigh_warps(buffers, share);
    if (buffers.splits[0] == 1) {
        merge_warps<kHeadSize>(warp, buffers, share, group, size, [&](int head, int d, const float (&sums)[4]) {
            const float sum = buffers.totals[head].sum;
            store_four(output + head * size + d, {sums[0] / sum, sums[1] / sum, sums[2] / sum, sums[3] / sum});
        });
        return;
    }
    const int64_t first = kv * params.scratch.splits * group, mine = first + int64_t{task.split} * group;
    merge_warps<kHeadSize>(warp, buffers, share, group, size, [&](int head, int d, const float (&sums)[4]) {
        store_four(params.scratch.outputs + (mine + head) * size + d, sums);
    });
    if (static_cast<int>(threadIdx.x) < group) {
        params.scratch.parts[mine + threadIdx.x] = buffers.totals[threadIdx.x];
    }
    if (arrives_last(params.scratch.arrivals + kv, buffers)) {
        const SplitResults results{params.scratch.parts + first, params.scratch.outputs + first * size};
        merge_splits<kHeadSize>(results, group, size, buffers, output);
    }
}

template <class T, int kHeadSize>
inline constexpr int kWarpFloats =
    AttentionWarp<T, kHeadSize>::kScratch > kWarpOutputs ? AttentionWarp<T, kHeadSize>::kScratch : kWarpOutputs;

// One split of one row and KV head.
template <int kHeadSize, class T>
__device__ __forceinline__ void attend_split(const SparseAttentionParams<T>& params, const SplitTask& task,
                                             const MergeBuffers& buffers) {
    constexpr int kFloats = kWarpFloats<T, kHeadSize>;
    const int64_t kv = task.kv;
    const int group = task.group, size = task.head_size;
    const WarpShare share(group);
    const int head = share.head_tile(warp_anew()) * kWarpHeads;
    const int heads = group - head < kWarpHeads ? group - head : kWarpHeads;
    AttentionWarp<T, kHeadSize> warp(params.query + (kv * group + head) * size, heads, size,
                                     buffers.outputs.part(warp_anew() * kFloats, kFloats));
    const int begin = task.split * task.tokens;
    const int end = task.count - begin < task.tokens ? task.count : begin + task.tokens;
    const int64_t cache = kv * params.limits.capacity * size;
    const int32_t* list = task.all ? nullptr : params.indices + kv * params.index_stride;
    warp.attend({params.k_cache + cache, params.v_cache + cache, list, end, size}, share.tiles(begin, end));
    warp.store_parts(buffers.parts.part(warp_anew() * kWarpHeads, kWarpHeads));
    finish_split<kHeadSize>(params, task, warp, buffers, share);
}

// Grid (G, B, splits of the rows that are read most often): a block takes every gridDim.z-th split of its row and KV head,
// one after the other. Splits come last in the order of blocks: those that a short row does not have start after all the
// work is under way.
template <class T, int kHeadSize>
__global__ void __launch_bounds__(kAttentionThreads, sizeof(T) == 2 && kHeadSize <= 128 ? 2 : 1)
    sparse_attention(const SparseAttentionParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    KVC_SHARED(SoftmaxPart, parts, kAttentionWarps * kWarpHeads);
    KVC_SHARED(float, weights, kAttentionWarps* kWarpHeads);
    KVC_SHARED(SoftmaxPart, totals, KVC_LARGEST_GROUP);
    KVC_SHARED(float, outputs, (kAttentionWarps * kWarpFloats<T, kHeadSize>));
    KVC_SHARED(int, splits, 1);
    KVC_SHARED(SplitTask, task, 1);
    KVC_SHARED(int, is_last, 1);
    const MergeBuffers buffers{parts, weights, totals, outputs, splits, is_last};

    const AttendedRow row = attended_row(params.cache_lengths[blockIdx.y], params.limits);
    const SplitPlan plan = split_plan(row.count);
    if (static_cast<int>(blockIdx.z) >= plan.splits) {
        const int zeros = row.count == 0 && blockIdx.z == 0 ? params.group * params.head_size : 0;
        for (int i = static_cast<int>(threadIdx.x) * 4; i < zeros; i += kAttentionThreads * 4) {
            store_four(params.output + row_head(params) * zeros + i, {0.0f, 0.0f, 0.0f, 0.0f});
        }
        return;
    }
    if (threadIdx.x == 0) {
        splits[0] = plan.splits;
        task[0] = {static_cast<int>(blockIdx.z),
                   plan.tokens,
                   row.count,
                   row.all,
                   static_cast<uint32_t>(row_head(params)),
                   params.group,
                   params.head_size};
    }
    __syncthreads();
#pragma unroll 1
    do {
        attend_split<kHeadSize>(params, task[0], buffers);  // its last barrier comes after it has read the task
        if (threadIdx.x == 0) {
            task[0].split += static_cast<int>(gridDim.z);
        }
        __syncthreads();
    } while (task[0].split < splits[0]);
}

}  // namespace kvc
