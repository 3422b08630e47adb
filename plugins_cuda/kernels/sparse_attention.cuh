// Exact attention of one decode step over the entries that each row reads: the selected ones, or all of them.
//
// Source: RocketKV (arXiv 2502.14051), algorithm 2, last step; split over tokens and merged by log-sum-exp as in
// Flash-Decoding (Dao et al., 2023). Scores, softmax and sums are fp32, scores are divided by sqrt(D).
//
// Shapes: B rows, G KV heads of g = H / G query heads, k tokens read of C slots, D channels. Each key and value is read
// from memory once for its whole group.
// Bytes per row: 2 G k D s of keys and values (s bytes per element), 4 G k of slots where the row is sparse; several
// splits add 8 G splits (g D + 2 g) through L2. Flops: 4 H k D.
// Latency: a block asks for its part of the list and the row's length at once, then for the query and the keys and
// values of its first tiles, and for those of later tiles while it computes.
//
// Deterministic: splits and their borders follow from k alone (split_plan), tiles from the split, and every merge goes
// in a fixed order. So a row has the same bits alone and in any batch, and dense attention has those of a sparse step
// that reads everything: the kernel is the same, with null in place of a list.
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

// The division of a row's tokens among blocks.
struct SplitPlan {
    int splits;
    int tokens;  // of each split but the last

    // The end of a split in a row of `count` tokens.
    __device__ __forceinline__ int end(int split, int count) const {
        return count - split * tokens < tokens ? count : (split + 1) * tokens;
    }
};

// A round: every warp of a block takes one tile. Splits are whole rounds. Up to two rounds, a second block would save
// less time than the merge through global memory costs. In a format a token has fewer bytes, and what a block does once
// would take as many instructions as one round: splits are longer.
inline constexpr int kRoundTokens = kAttentionWarps * kTileTokens;
constexpr __host__ __device__ int unsplit_tokens(bool exact) { return (exact ? 2 : 4) * kRoundTokens; }
constexpr __host__ __device__ int shortest_split(bool exact) { return (exact ? 1 : 4) * kRoundTokens; }

template <class Formats>
inline constexpr bool kExactFormats = Formats::kKeys == VectorFormat::kExact;

template <class Formats>
__device__ __forceinline__ SplitPlan split_plan(int count) {
    constexpr int kUnsplit = unsplit_tokens(kExactFormats<Formats>), kShortest = shortest_split(kExactFormats<Formats>);
    if (count <= kUnsplit) {
        return {count == 0 ? 0 : 1, kUnsplit};
    }
    constexpr int kGranule = kMostSplits * kRoundTokens;
    const int tokens = max((count + kGranule - 1) / kGranule * kRoundTokens, kShortest);
    return {(count + tokens - 1) / tokens, tokens};
}

// Scratch memory: results of the splits of a row, and the number of them that have arrived.
struct AttentionScratch {
    int32_t* arrivals;   // [B,G]: zeros before the launch (written by the kernel that appends the token)
    SoftmaxPart* parts;  // [B,G,splits,g]
    float* outputs;      // [B,G,splits,g,D]
    int32_t splits;      // most splits of a row
};

template <class T>
struct SparseAttentionParams {
    const T* query;                // [B,H,D]
    VectorTable keys;              // [B,G,C,.]
    VectorTable values;            // [B,G,C,.]
    const int64_t* cache_lengths;  // [B]: entries before the append
    const int32_t* indices;        // [B,G,index_stride]: slots that a sparse row reads, ascending; or null: none is
    T* output;                     // [B,H,D]
    AttentionScratch scratch;
    AttentionLimits limits;
    int64_t index_stride;  // a multiple of kListVector
    int32_t kv_heads;      // G
    int32_t group;         // H / G
    int32_t head_size;     // D
    int32_t stages;        // tiles that a warp copies ahead of their turn: 1 or 2
    float scale;           // log2(e) / sqrt(D): scores are in units of log 2
};

template <class T, int kHeadSize, class Formats>
using AttentionWarp =
    std::conditional_t<std::is_same_v<T, float>, FmaWarp<kHeadSize, Formats>, TensorCoreWarp<T, kHeadSize, Formats>>;

// Floats of shared memory of each warp: its ring of tiles, and over it its output.
template <class T, int kHeadSize, class Formats>
constexpr __host__ __device__ int warp_floats(int stages) {
    const int ring = stages * AttentionWarp<T, kHeadSize, Formats>::kTileFloats;
    return ring > kWarpOutputs<kHeadSize> ? ring : kWarpOutputs<kHeadSize>;
}

// Slots of a list that a block holds at a time, and those of one copy.
template <class Formats>
inline constexpr int kListTokens = unsplit_tokens(kExactFormats<Formats>);
inline constexpr int kListVector = 4;
static_assert(kListTokens<Int8Formats> <= kListVector * kAttentionThreads);

// Row and KV head of this block, as an index into [B,G].
template <class T>
__device__ __forceinline__ int64_t row_head(const SparseAttentionParams<T>& params) {
    return int64_t{blockIdx.y} * params.kv_heads + blockIdx.x;
}

// Starts to copy the slots of tokens first..end - 1 of a sparse row and KV head, at most kListTokens. The last vector
// may reach past the list, never past the stride.
template <class Formats, class T>
__device__ __forceinline__ void copy_list(const SparseAttentionParams<T>& params, int64_t kv, int first, int end,
                                          const SharedSpan<int32_t>& list) {
    const int at = thread_anew() * kListVector;
    if (at < kListTokens<Formats> && first + at < end) {
        copy_async_16(&list[at], params.indices + kv * params.index_stride + first + at);
    }
    copy_async_commit();
}

// The split that a block works on, in shared memory: over the tiles a thread keeps no part of it in registers.
struct SplitTask {
    int split;
    int first;   // first token of the block's part of the list; the split's own at first
    int splits;  // of the row
    int tokens;  // of each split but the last
    int count;   // tokens that the row reads
    int listed;  // 1 where they are listed
    int kv;      // row_head
    int group;   // and the sizes, else the compiler would keep values derived from them
    int head_size;

    __device__ __forceinline__ int end() const { return SplitPlan{splits, tokens}.end(split, count); }
    template <class Formats>
    __device__ __forceinline__ int part_end() const {
        constexpr int kTokens = kListTokens<Formats>;
        return listed != 0 && end() - first > kTokens ? first + kTokens : end();
    }
};

// One split by one warp: in parts, as its list is longer than the part that the block holds. The first part is there.
template <int kHeadSize, class Formats, class T>
__device__ __forceinline__ void attend_split(const SparseAttentionParams<T>& params, SplitTask& task,
                                             const SharedSpan<int32_t>& list, const MergeBuffers& buffers) {
    const int head = WarpShare(task.group).head_tile(warp_anew()) * kWarpHeads;
    const int heads = task.group - head < kWarpHeads ? task.group - head : kWarpHeads;
    AttentionWarp<T, kHeadSize, Formats> warp(params.query + (int64_t{task.kv} * task.group + head) * task.head_size,
                                              heads, task.head_size, params.scale, buffers.outputs_of(warp_anew()),
                                              params.stages);
    while (true) {
        const int size = task.head_size;
        const int64_t cache = task.kv * params.limits.capacity;
        const TokenRows<T> part{params.keys.from(cache),
                                params.values.from(cache),
                                list,
                                task.listed != 0,
                                task.first,
                                task.part_end<Formats>(),
                                size};
        warp.attend(part, WarpShare(task.group).tiles(warp_anew(), part.first, part.end));
        const int next = task.part_end<Formats>();
        if (next == task.end()) {
            break;
        }
        __syncthreads();  // the other warps have read the part
        copy_list<Formats>(params, task.kv, next, task.end(), list);
        copy_async_wait<0>();
        if (threadIdx.x == 0) {
            task.first = next;
        }
        __syncthreads();
    }
    warp.store_parts(buffers.parts_of(warp_anew()));
    warp.store_output(buffers.outputs_of(warp_anew()));
}

// The block's result from those of its warps; the output, if there is no other split or this one is the last to arrive.
template <int kHeadSize, class T>
__device__ __forceinline__ void finish_split(const SparseAttentionParams<T>& params, const SplitTask& task,
                                             const MergeBuffers& buffers) {
    __syncthreads();
    const int group = task.group, size = task.head_size;
    const int64_t kv = task.kv;
    T* const output = params.output + kv * group * size;
    if (task.splits == 1) {
        return write_merged_warps<kHeadSize>(buffers, group, size, output);
    }
    const int64_t first = kv * params.scratch.splits * group;
    const SplitResults results{params.scratch.parts + first, params.scratch.outputs + first * size};
    merge_warps<kHeadSize>(buffers, group, size,
                           [&](int head, int d, const float (&sums)[4], const SoftmaxPart& total) {
                               const int64_t row = int64_t{task.split} * group + head;
                               store_four(results.outputs + row * size + d, sums);
                               if (d == 0) {
                                   results.parts[row] = total;
                               }
                           });
    if (arrives_last(params.scratch.arrivals + kv, task.splits, buffers)) {
        merge_splits<kHeadSize>(results, task.splits, group, size, buffers, output);
    }
}

template <int kHeadSize, class Formats, class T>
__device__ __forceinline__ void attend_row(const SparseAttentionParams<T>& params) {
    start_next_launch();
    wait_for_previous_launch();
    KVC_SHARED(SoftmaxPart, parts, kAttentionWarps * kWarpHeads);
    KVC_SHARED(int32_t, list, kListTokens<Formats>);
    KVC_SHARED(SplitTask, task, 1);
    KVC_SHARED(int, is_last, 1);
    const int floats = warp_floats<T, kHeadSize, Formats>(params.stages);
    const MergeBuffers buffers{parts, dynamic_shared<float>(0, kAttentionWarps * floats), floats, is_last};

    const int64_t kv = row_head(params);

    // All sparse rows read top_k tokens, so their lists are copied before their lengths are known.
    if (params.indices != nullptr) {
        const int top_k = static_cast<int>(params.limits.top_k), split = static_cast<int>(blockIdx.z);
        const SplitPlan sparse = split_plan<Formats>(top_k);
        copy_list<Formats>(params, kv, split * sparse.tokens, sparse.end(split, top_k), list);
    }
    const int64_t length = params.cache_lengths[blockIdx.y];
    const AttendedRow row = attended_row(length, params.limits);
    const SplitPlan plan = split_plan<Formats>(row.count);
    if (threadIdx.x == 0) {
        task[0] = {static_cast<int>(blockIdx.z),
                   static_cast<int>(blockIdx.z) * plan.tokens,
                   plan.splits,
                   plan.tokens,
                   row.count,
                   row.all ? 0 : 1,
                   static_cast<int>(kv),
                   params.group,
                   params.head_size};
    }
    copy_async_wait<0>();
    __syncthreads();

    if (row.count == 0 && blockIdx.z == 0) {
        const int zeros = params.group * params.head_size;
        write_zeros<kAttentionThreads>(params.output + kv * zeros, zeros);
    }
#pragma unroll 1
    while (task[0].split < task[0].splits) {
        attend_split<kHeadSize, Formats>(params, task[0], list, buffers);
        finish_split<kHeadSize>(params, task[0], buffers);
        if (threadIdx.x == 0) {  // the others have read both: among several splits, before arrives_last's barriers
            task[0].split += static_cast<int>(gridDim.z);
            task[0].first = task[0].split * task[0].tokens;
        }
        __syncthreads();
    }
}

// Grid (G, B, splits of the rows that are read most often, sparse ones among them): a block takes every gridDim.z-th split
// of its row and KV head, one after the other, and of a sparse row at most one. Splits come last in the order of blocks:
// those that a short row does not have start after all the work is under way.
template <class T, int kHeadSize>
__global__ void __launch_bounds__(kAttentionThreads, sizeof(T) == 2 && kHeadSize <= 128 ? 2 : 1)
    sparse_attention(const SparseAttentionParams<T> params) {
    attend_row<kHeadSize, ExactFormats>(params);
}

// Blocks of a multiprocessor; values in 4 bits, with a minimum beside each scale, take more registers at head size 128.
template <class T, int kHeadSize, class Formats>
constexpr int kBlocksInFormat =
    sizeof(T) == 2 && (kHeadSize <= 64 || (kHeadSize <= 128 && Formats::kValues != VectorFormat::kInt4)) ? 2 : 1;

// The same for caches in a format, whose kinds are Formats::kKeys and Formats::kValues.
template <class T, int kHeadSize, class Formats>
__global__ void __launch_bounds__(kAttentionThreads, kBlocksInFormat<T, kHeadSize, Formats>)
    sparse_attention_in_format(const SparseAttentionParams<T> params) {
    attend_row<kHeadSize, Formats>(params);
}

}  // namespace kvc
