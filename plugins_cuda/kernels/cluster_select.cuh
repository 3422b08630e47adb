// The selection of radix_select.cuh and emit_selected.cuh by a cluster of blocks. Each block has a part of the keys in
// registers: block 0 the first candidates, block 1 those behind them, and so on.
//
// A block adds up its own histogram and writes it into every block's shared memory. After a barrier of the cluster each
// block adds up all histograms, so all find the same digit and the same threshold. The blocks exchange the warps'
// shares in the same way; the places of a block's elements follow from them.
//
// Barriers of the cluster: one in each radix pass, and one before the elements are named. Two passes write to places of
// their own: a block that is a pass ahead finds the places of the pass before still being read.
//
// Determinism: that of radix_select.cuh. Sums of integers do not depend on who adds them.
#pragma once

#include <cstdint>

#include "kernels/cluster.cuh"
#include "kernels/emit_selected.cuh"
#include "kernels/radix_select.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

namespace kvc {

constexpr int kClusterCopies = 4;  // histograms of a block: the copies of a bin are one vector

// The data that the blocks of a cluster write to each other while they select.
template <int kThreads>
struct ClusterSelection {
    static constexpr int kWarps = kThreads / kWarpSize;  // of a block
    static constexpr int kHistograms = 2 * kClusterBlocks * kRadixBins;
    static constexpr int kShares = kClusterBlocks * kWarps;
    static_assert(kThreads == kRadixBins, "every bin has a thread");
    static_assert(kShares % kWarpSize == 0, "lanes share the warps of a cluster evenly");

    SharedSpan<uint32_t> histogram;  // [kHistogramWords<kClusterCopies>]
    SharedSpan<uint32_t> sums;       // [kRadixBins]
    SharedSpan<uint32_t>
        histograms;              // [2][kClusterBlocks][kRadixBins]: in even passes and in odd ones, from every block
    SharedSpan<int32_t> larger;  // [kClusterBlocks][kWarps]: weight that every warp selects above the threshold
    SharedSpan<int32_t> equal;   // [kClusterBlocks][kWarps]: weight of every warp's keys equal to it

    // sums[i] = weight in bin 255 - i of all blocks; clears the histogram for the next pass.
    __device__ __forceinline__ void add_up(int pass) const {
        const int bin = static_cast<int>(threadIdx.x);
        const SharedSpan<uint4> copies = histogram.cast<uint4>();
        const uint4 own = copies[bin];
        copies[bin] = uint4{0, 0, 0, 0};
        const SharedSpan<uint32_t> here =
            histograms.part(pass % 2 * kClusterBlocks * kRadixBins + bin, (kClusterBlocks - 1) * kRadixBins + 1);
#pragma unroll
        for (int rank = 0; rank < kClusterBlocks; ++rank) {
            here.of_block(rank)[cluster_rank() * kRadixBins] = own.x + own.y + own.z + own.w;
        }
        synchronize_cluster();
        uint32_t weight = 0;
#pragma unroll
        for (int rank = 0; rank < kClusterBlocks; ++rank) {
            weight += here[rank * kRadixBins];
        }
        sums[kRadixBins - 1 - bin] = weight;
    }

    // The totals of the cluster's warps before this one.
    __device__ __forceinline__ Share share_before_warp(Share of_warp) const {
        const int lane = lane_index();
        const int own = cluster_rank() * kWarps + warp_index();
        if (lane < kClusterBlocks) {
            larger.of_block(lane)[own] = of_warp.larger;
            equal.of_block(lane)[own] = of_warp.equal;
        }
        synchronize_cluster();
        Share before;
#pragma unroll
        for (int first = 0; first < kShares; first += kWarpSize) {
            const int other = first + lane;
            if (other < own) before = before + Share{larger[other], equal[other]};
        }
        return {warp_sum(before.larger), warp_sum(before.equal)};
    }
};

// Calls emit(i, slot, count) for every element of this block that the cluster selects, as emit_ascending does. The
// caller has cleared the histogram and passed a barrier.
template <int kThreads, int kKeys, class WeightAt, class Emit>
__device__ __forceinline__ void select_in_cluster(const RegisterKeys<kKeys>& keys, int32_t quota, int32_t single,
                                                  WeightAt weight_at, const ClusterSelection<kThreads>& cluster,
                                                  Emit emit) {
    int pass = 0;
    const Threshold threshold = find_threshold_by<kThreads, kClusterCopies>(
        keys, quota, single, weight_at, cluster.histogram, cluster.sums, [&] { cluster.add_up(pass++); });
    const auto before_warp = [&](Share of_warp) { return cluster.share_before_warp(of_warp); };
    emit_ascending_by(keys, threshold, weight_at, before_warp, emit);
}

}  // namespace kvc
