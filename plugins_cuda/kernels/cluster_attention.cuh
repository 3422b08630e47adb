// The attention of sparse_attention.cuh by the blocks of a cluster that have listed the tokens of a row and KV head:
// every block has the whole list, and the query, in its shared memory.
//
// A row of one split has eight warps' tiles: each block takes the tiles of kAttentionWarps / blocks of these warps. Of
// several splits each block takes every blocks-th, with all its warps. The blocks take turns so that the row's last token,
// which may be the new one, is read by the block that has stored it: no other has to see it. Results are sent to the
// first block, which merges them once they are there.
//
// Determinism: the tiles of a warp and the order of every sum are those of sparse_attention.cuh, whoever takes them: the
// bits are the same for any number of blocks.
#pragma once

#include "kernels/attended_row.cuh"
#include "kernels/attention_merge.cuh"
#include "kernels/attention_tensor_core.cuh"
#include "kernels/cluster.cuh"
#include "kernels/cluster_inbox.cuh"
#include "kernels/sparse_attention.cuh"

namespace kvc {

// Layout of the dynamic shared memory; offsets in bytes, multiples of 16. Other blocks write into the first block's
// results, while it may still select; the ring is used once the own block has selected.
struct ClusterAttentionLayout {
    int outputs;      // float: of the warps of one split, or [splits,g,D]
    int parts;        // SoftmaxPart [kAttentionWarps,kWarpHeads]
    int split_parts;  // SoftmaxPart [splits,g]
    int ring;         // float [kAttentionWarps,warp_floats]
    int warp_floats;
    int ring_end;

    __host__ __device__ __forceinline__ int results_end() const { return ring; }
};

template <class T, int kHeadSize>
ClusterAttentionLayout cluster_attention_layout(int splits, int group, int head_size, int stages) {
    constexpr int kOfWarps = kAttentionWarps * kWarpOutputs<kHeadSize>, kPartBytes = sizeof(SoftmaxPart);
    const int of_splits = splits * group * head_size;
    ClusterAttentionLayout layout;
    layout.outputs = 0;
    layout.parts = (of_splits > kOfWarps ? of_splits : kOfWarps) * static_cast<int>(sizeof(float));
    layout.split_parts = layout.parts + kAttentionWarps * kWarpHeads * kPartBytes;
    layout.ring = layout.split_parts + (splits * group + 1) / 2 * 2 * kPartBytes;
    layout.warp_floats = warp_floats<T, kHeadSize, ExactFormats>(stages);
    layout.ring_end = layout.ring + kAttentionWarps * layout.warp_floats * static_cast<int>(sizeof(float));
    return layout;
}

// What the blocks of a cluster attend to: one KV head of a row.
template <class T>
struct AttendedHead {
    VectorTable keys;          // [C,D]
    VectorTable values;        // [C,D]
    SharedSpan<int32_t> list;  // the slots of a row that does not read all its entries
    SharedSpan<T> query;       // [g,D]
    T* output;                 // [g,D]
    int group;
    int head_size;
    int stages;
    float scale;
};

template <class T, int kHeadSize>
struct ClusterAttention {
    const AttendedHead<T>& head;
    const ClusterAttentionLayout& layout;
    const AttendedRow& row;
    int blocks;     // of the cluster: a power of two, at most kAttentionWarps
    int appender;   // rank of the block that has stored the new token
    Inbox results;  // of the first block

    // Bytes that the first block gets for a row: of every warp of one split, or of all splits.
    __device__ __forceinline__ static uint32_t result_bytes(int count, int group, int head_size) {
        constexpr int kPart = sizeof(SoftmaxPart), kFloat = sizeof(float);
        const int splits = split_plan<ExactFormats>(count).splits;
        const int of_warps = kAttentionWarps * kWarpHeads * (kPart + kHeadSize * kFloat);
        return static_cast<uint32_t>(splits == 1 ? of_warps : splits * group * (kPart + head_size * kFloat));
    }

    // After the lists, and of a row that reads all its entries after its new one is stored. Includes a barrier of the
    // block or of the cluster before the first copy.
    __device__ __forceinline__ void attend() const {
        if (row.all) {
            synchronize_cluster();  // the new token is in memory
        } else {
            __syncthreads();  // the list is whole
        }
        const SplitPlan plan = split_plan<ExactFormats>(row.count);
        const bool is_whole = plan.splits == 1;
        const int warps = is_whole ? kAttentionWarps >> log2_of_blocks(blocks) : kAttentionWarps;  // of a split, here
        const int last =
            is_whole ? (row.count - 1) / kTileTokens % kAttentionWarps * blocks / kAttentionWarps : plan.splits - 1;
        const int turn = (last + cluster_rank() - appender) & (blocks - 1);
        const int first_warp = is_whole ? turn * warps : 0;
        const int step = is_whole ? 1 : blocks;
#pragma unroll 1
        for (int split = is_whole ? 0 : turn; split < plan.splits; split += step) {
            if (warp_index() < warps) {
                attend_as_warp(plan, split, first_warp + warp_index(), is_whole);
            }
            if (!is_whole) {
                __syncthreads();  // the warps' results are there
                merge_split(split, plan.splits);
                __syncthreads();  // and merged: the next split may replace them
            }
        }
        if (cluster_rank() == 0) {
            results.wait();
            finish(plan.splits);
        }
    }

private:
    // The tiles of warp number `warp` of a split. Results go to the first block, or stay for merge_split.
    __device__ __forceinline__ void attend_as_warp(const SplitPlan& plan, int split, int warp, bool is_whole) const {
        const WarpShare share(head.group);
        const int first_head = share.head_tile(warp) * kWarpHeads;
        const int own_ring = layout.ring + warp_index() * layout.warp_floats * static_cast<int>(sizeof(float));
        const int end = plan.end(split, row.count), outputs = kWarpOutputs<kHeadSize>;
        AttentionWarp<T, kHeadSize, ExactFormats> attention(
            &head.query[first_head * head.head_size], min(head.group - first_head, kWarpHeads), head.head_size,
            head.scale, dynamic_shared<float>(own_ring, layout.warp_floats), head.stages);
        const TokenRows<T> rows{head.keys, head.values, head.list, !row.all, 0, end, head.head_size};
        static_assert(unsplit_tokens(true) == 2 * kRoundTokens, "a warp of one split has two tiles at most");
        const TileRange tiles = share.tiles(warp, split * plan.tokens, end);
        if (is_whole && head.stages == 2 && tiles.first + tiles.step < tiles.end) {
            attention.attend_two(rows, tiles);
        } else {
            attention.attend(rows, tiles);
        }
        const SharedSpan<SoftmaxPart> own_parts = parts().part(warp * kWarpHeads, kWarpHeads);
        if (is_whole) {
            const int to = layout.outputs + warp * outputs * static_cast<int>(sizeof(float));
            attention.store_parts(results.outgoing(own_parts, 0));
            attention.store_output(results.outgoing(dynamic_shared<float>(to, outputs), 0));
        } else {
            attention.store_parts(own_parts);
            attention.store_output(dynamic_shared<float>(own_ring, outputs));
        }
    }

    // Writes the result of one of several splits, from those of its warps, into the first block.
    __device__ __forceinline__ void merge_split(int split, int splits) const {
        const auto outputs = results.outgoing(split_outputs(splits), 0).template cast<float4>();
        const auto totals = results.outgoing(split_parts(splits), 0);
        merge_warps<kHeadSize, true>({parts(), ring(), layout.warp_floats, {nullptr, 0}}, head.group, head.head_size,
                                     [&](int of, int d, const float (&sums)[4], const SoftmaxPart& total) {
                                         const int at = split * head.group + of;
                                         outputs[(at * head.head_size + d) / 4] =
                                             float4{sums[0], sums[1], sums[2], sums[3]};
                                         if (d == 0) {
                                             totals[at] = total;
                                         }
                                     });
    }

    // By the first block, which has the results of all.
    __device__ __forceinline__ void finish(int splits) const {
        constexpr int kOutputs = kWarpOutputs<kHeadSize>;
        if (splits == 1) {
            const SharedSpan<float> outputs = dynamic_shared<float>(layout.outputs, kAttentionWarps * kOutputs);
            write_merged_warps<kHeadSize, true>({parts(), outputs, kOutputs, {nullptr, 0}}, head.group, head.head_size,
                                                head.output);
        } else {
            merge_splits<kHeadSize>({&split_parts(splits)[0], &split_outputs(splits)[0]}, splits, head.group,
                                    head.head_size, {parts(), ring(), layout.warp_floats, {nullptr, 0}}, head.output);
        }
    }

    __device__ __forceinline__ SharedSpan<SoftmaxPart> parts() const {
        return dynamic_shared<SoftmaxPart>(layout.parts, kAttentionWarps * kWarpHeads);
    }
    __device__ __forceinline__ SharedSpan<float> ring() const {
        return dynamic_shared<float>(layout.ring, kAttentionWarps * layout.warp_floats);
    }
    __device__ __forceinline__ SharedSpan<SoftmaxPart> split_parts(int splits) const {
        return dynamic_shared<SoftmaxPart>(layout.split_parts, splits * head.group);
    }
    __device__ __forceinline__ SharedSpan<float> split_outputs(int splits) const {
        return dynamic_shared<float>(layout.outputs, splits * head.group * head.head_size);
    }
};

}  // namespace kvc
