// select_prompt of pool_select.cuh by a cluster of blocks for each row and KV head, on sm_90 and later. Every block has a
// share of the votes' keys, neighbours, in registers. The blocks exchange how many keys each has in the bins of a digit,
// find the same threshold, and each names the positions that are selected from its own share.
//
// Source and semantics: those of select_prompt, and its results.
//
// Digits have 11 bits (cluster_select.cuh): at most three passes. In each, a block writes its counts, 16 bits a bin, into
// every block: 4 KiB, into an inbox of the pass (cluster_inbox.cuh). A buffer serves every second pass, for a block may be a
// pass ahead of another: it sends counts as soon as it has its threshold's digit, which the other may still look for. It
// is no further ahead, as no block sends a pass's counts before it has the last one's digit.
//
// Barrier of the cluster: one for "every block has begun", which is waited for while the keys are on their way.
//
// Contention: pooled votes are equal in runs, and lanes that add 1 to one bin are one addition (ATOMS.POPC.INC), so there
// is one copy of the histogram.
//
// Bytes per row and KV head of n > budget: 4·(n - V) read, 4·C written.
//
// Determinism: integer sums.
#pragma once

#include <cstdint>

#include "kernels/cluster.cuh"
#include "kernels/cluster_inbox.cuh"
#include "kernels/cluster_select.cuh"
#include "kernels/pool_select.cuh"

namespace kvc {

// Layout of the dynamic shared memory; offsets in bytes, multiples of 16. Other blocks write into all of it.
template <int kThreads>
struct PromptExchange {
    static constexpr int kWarps = kThreads / kWarpSize;
    static constexpr int kVectors = kClusterBlocks * kRadixBins;  // of counts: a group of bins each, 16 bits a bin
    static constexpr int kCounts = 0;                             // uint4 [2][kVectors]
    static constexpr int kShares = 2 * kVectors * static_cast<int>(sizeof(uint4));  // uint32_t [blocks][kWarps]
    static constexpr int kBytes = kShares + kClusterBlocks * kWarps * static_cast<int>(sizeof(uint32_t));
};

// This thread's keys of a row, neighbours, in registers. What it lacks counts as keys of 0 behind all others: as no quota
// is larger than the row, they are never selected.
template <int kKeys>
struct PromptKeys {
    static_assert(kKeys <= 32, "a bit for each");
    uint32_t keys[kKeys];
    int32_t first;  // position
    uint32_t own;   // a bit for each key that is no other thread's

    // The keys of a row start at a multiple of 16 bytes; the last vector may have some behind it.
    template <int kThreads>
    __device__ __forceinline__ static PromptKeys of(const uint32_t* row, int32_t count) {
        constexpr int32_t kWidth = 4, kOthers = kThreads * kClusterBlocks * kWidth;
        const int32_t each = (count + kOthers - 1) / kOthers * kWidth;  // of all threads but the last ones
        PromptKeys own;
        own.first = (cluster_rank() * kThreads + static_cast<int32_t>(threadIdx.x)) * each;
        const int32_t left = min(each, count - own.first);
        own.own = left >= 32 ? 0xffffffffu : (1u << max(left, 0)) - 1;
#pragma unroll
        for (int32_t j = 0; j < kKeys; j += kWidth) {
            uint4 four{};
            if (j < left) {
                four = platform::load_16_bytes(row + own.first + j);
            }
            own.keys[j] = four.x;
            own.keys[j + 1] = j + 1 < left ? four.y : 0;
            own.keys[j + 2] = j + 2 < left ? four.z : 0;
            own.keys[j + 3] = j + 3 < left ? four.w : 0;
        }
        return own;
    }
};

// The selection of one row and KV head, by its cluster.
template <int kThreads>
struct PromptSelection {
    using Exchange = PromptExchange<kThreads>;
    static constexpr int kWarps = Exchange::kWarps;
    static constexpr int kWords = kGroupBins / 2;  // of a group's counts
    static constexpr int kInboxes = kWidePasses + 1;

    SharedSpan<uint32_t> histogram;   // [kWideBins], of the block's own keys
    SharedSpan<uint32_t> group_sums;  // [kRadixBins]: of all blocks' keys, the highest group first
    SharedSpan<uint64_t> counters;    // [kInboxes]: of the counts of each pass, and of shares

    // Called ahead of a barrier of the cluster.
    __device__ __forceinline__ void open_inboxes() const {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < kInboxes; ++i) {
                inbox(i).make();
            }
            fence_inboxes();
        }
    }

    __device__ __forceinline__ void clear_histogram() const {
        if (const auto group = static_cast<int32_t>(threadIdx.x); group < kRadixBins) {
            clear_group(group);
        }
    }

    // What find_threshold of radix_select.cuh finds, for a quota of 1 up to all keys. Called once all blocks have begun
    // and the histogram is cleared, behind a barrier.
    template <int kKeys>
    __device__ __forceinline__ Threshold find_threshold(const PromptKeys<kKeys>& keys, int32_t quota) const {
        uint32_t prefix = 0, mask = 0;
#pragma unroll 1
        for (int32_t pass = 0; pass < kWidePasses; ++pass) {
            const int32_t shift =
                max(32 - (pass + 1) * kWideBits, 0);  // the last digit repeats a bit of the one before
#pragma unroll
            for (int32_t j = 0; j < kKeys; ++j) {
                if (((keys.keys[j] ^ prefix) & mask) == 0) {
                    atomicAdd(&histogram[(keys.keys[j] >> shift) % kWideBins], 1u);
                }
            }
            __syncthreads();
            send_counts(pass);
            inbox(pass).wait();
            add_up(pass);
            __syncthreads();
            const auto group = static_cast<int32_t>(take_digit(group_sums, quota));
            int32_t weight = 0;
            const int32_t bin = take_bin(pass, group, quota, weight);
            prefix |= static_cast<uint32_t>(group * kGroupBins + bin) << shift;
            mask |= static_cast<uint32_t>(kWideBins - 1) << shift;
            if (weight <= quota) break;
        }
        return {prefix, quota, mask};
    }

    // Writes the selected positions into the first slots of `indices`, in ascending order.
    template <int kKeys>
    __device__ __forceinline__ void emit(const PromptKeys<kKeys>& keys, const Threshold& threshold,
                                         int32_t* indices) const {
        uint32_t larger = 0, equal = 0;
#pragma unroll
        for (int32_t j = 0; j < kKeys; ++j) {
            larger |= threshold.is_below(keys.keys[j]) ? 1u << j : 0;
            equal |= threshold.is_equal(keys.keys[j]) ? 1u << j : 0;
        }
        equal &= keys.own;
        // Both numbers in one word: those of a warp have at most 11 bits.
        const auto own = static_cast<uint32_t>(__popc(larger) << 16 | __popc(equal));
        uint32_t of_warp = 0;
        const uint32_t below = warp_exclusive_scan(own, of_warp);
        Share before = share_before_warp(of_warp);
        before = before + Share{static_cast<int32_t>(below >> 16), static_cast<int32_t>(below & 0xffffu)};
        const int32_t ties = threshold.ties - before.equal;  // left for this thread's
        int32_t slot = before.slots(threshold.ties);
#pragma unroll 1
        while (equal != 0 && __popc(equal) > ties) {  // seldom: in the thread where they end, and those behind it
            equal = ties <= 0 ? 0 : equal & ~(0x80000000u >> __clz(static_cast<int32_t>(equal)));
        }
        const uint32_t selected = larger | equal;
        if (selected == 0) {
            return;
        }
#pragma unroll
        for (int32_t j = 0; j < kKeys; ++j) {
            if ((selected >> j & 1) != 0) {
                indices[slot] = keys.first + j;
                ++slot;
            }
        }
    }

private:
    __device__ __forceinline__ Inbox inbox(int number) const { return {counters.part(number, 1)}; }

    // What this block gets: the others may send before.
    __device__ __forceinline__ void expect(int number, int bytes) const {
        if (threadIdx.x == 0) {
            inbox(number).expect(static_cast<uint32_t>(bytes));
        }
    }

    // The totals of the warps before this one, in the blocks before its own too.
    __device__ __forceinline__ Share share_before_warp(uint32_t of_warp) const {
        const int32_t lane = lane_index(), number = cluster_rank() * kWarps + warp_index();
        expect(kWidePasses, kClusterBlocks * kWarps * static_cast<int>(sizeof(uint32_t)));
        if (lane < kClusterBlocks) {
            inbox(kWidePasses).outgoing(shares(), lane)[number] = of_warp;
        }
        inbox(kWidePasses).wait();
        Share before;
#pragma unroll
        for (int32_t first = 0; first < kClusterBlocks * kWarps; first += kWarpSize) {
            if (first + lane < number) {
                const uint32_t other = shares()[first + lane];
                before = before + Share{static_cast<int32_t>(other >> 16), static_cast<int32_t>(other & 0xffffu)};
            }
        }
        return {warp_sum(before.larger), warp_sum(before.equal)};
    }

    // Sends this block's counts to every block, and clears them for the next pass.
    __device__ __forceinline__ void send_counts(int32_t pass) const {
        expect(pass, Exchange::kVectors * static_cast<int>(sizeof(uint4)));
        const auto group = static_cast<int32_t>(threadIdx.x);
        if (group >= kRadixBins) {
            return;
        }
        const SharedSpan<uint4> own = histogram.cast<uint4>();
        const uint4 lower = own[2 * group], upper = own[2 * group + 1];
        clear_group(group);
        const uint4 words = {lower.x | lower.y << 16, lower.z | lower.w << 16, upper.x | upper.y << 16,
                             upper.z | upper.w << 16};
#pragma unroll
        for (int rank = 0; rank < kClusterBlocks; ++rank) {
            inbox(pass).outgoing(counts(pass), rank)[cluster_rank() * kRadixBins + group] = words;
        }
    }

    __device__ __forceinline__ void clear_group(int32_t group) const {
        const SharedSpan<uint4> own = histogram.cast<uint4>();
        own[2 * group] = own[2 * group + 1] = uint4{0, 0, 0, 0};
    }

    // A block has fewer than 2^16 keys, so neither half of a sum of its words carries.
    __device__ __forceinline__ void add_up(int32_t pass) const {
        const auto group = static_cast<int32_t>(threadIdx.x);
        if (group >= kRadixBins) {
            return;
        }
        uint32_t sum = 0;
#pragma unroll
        for (int rank = 0; rank < kClusterBlocks; ++rank) {
            const uint4 words = counts(pass)[rank * kRadixBins + group];
            const uint32_t halves = words.x + words.y + words.z + words.w;
            sum += (halves & 0xffffu) + (halves >> 16);
        }
        group_sums[kRadixBins - 1 - group] = sum;
    }

    // The bin of the group at which the count from the top reaches `quota`; `quota` becomes the rest for that bin, `weight`
    // what is in it. Every warp finds it for itself: a lane takes two bins of one block.
    __device__ __forceinline__ int32_t take_bin(int32_t pass, int32_t group, int32_t& quota, int32_t& weight) const {
        static_assert(kWords * kClusterBlocks == kWarpSize, "every word has a lane");
        const int32_t word = lane_index() % kWords, rank = lane_index() / kWords;
        const SharedSpan<uint32_t> words = counts(pass).template cast<uint32_t>();
        const uint32_t halves = words[(rank * kRadixBins + group) * kWords + word];
        auto lower = static_cast<int32_t>(halves & 0xffffu), upper = static_cast<int32_t>(halves >> 16);
#pragma unroll
        for (int step = kWords; step < kWarpSize; step *= 2) {
            lower += __shfl_xor_sync(kFullWarp, lower, step);
            upper += __shfl_xor_sync(kFullWarp, upper, step);
        }
        const int32_t both = lower + upper;
        const int32_t neighbour = __shfl_xor_sync(kFullWarp, both, 1);
        const int32_t others = __shfl_xor_sync(kFullWarp, both + neighbour, 2);
        const int32_t above = (word % 2 == 0 ? neighbour : 0) + (word < 2 ? others : 0);
        const bool here = above < quota && quota <= above + both, in_upper = quota <= above + upper;
        const int32_t owner = __ffs(static_cast<int32_t>(__ballot_sync(kFullWarp, here))) - 1;
        weight = __shfl_sync(kFullWarp, in_upper ? upper : lower, owner);
        quota -= __shfl_sync(kFullWarp, in_upper ? above : above + upper, owner);
        return __shfl_sync(kFullWarp, 2 * word + (in_upper ? 1 : 0), owner);
    }

    __device__ __forceinline__ SharedSpan<uint4> counts(int32_t pass) const {
        const SharedSpan<uint4> both = dynamic_shared<uint4>(Exchange::kCounts, 2 * Exchange::kVectors);
        return both.part(pass % 2 * Exchange::kVectors, Exchange::kVectors);
    }
    __device__ __forceinline__ SharedSpan<uint32_t> shares() const {
        return dynamic_shared<uint32_t>(Exchange::kShares, kClusterBlocks * kWarps);
    }
};

// Grid (kClusterBlocks, G, B) in clusters of kClusterBlocks. A thread has at most kKeys keys. Empty where there are no
// clusters: never launched there.
template <int kThreads, int kKeys>
__global__ void __launch_bounds__(kThreads, 1) select_prompt_in_cluster(const PoolSelectParams params) {
    static_assert(kThreads * kKeys < 1 << 16, "a block's counts have 16 bits");
    static_assert(kThreads >= kRadixBins, "every group of bins has a thread");
    start_next_launch();
    wait_for_previous_launch();
    if constexpr (platform::kHasClusters) {
        KVC_SHARED(uint32_t, histogram, kWideBins);
        KVC_SHARED(uint32_t, group_sums, kRadixBins);
        KVC_SHARED(uint64_t, counters, PromptSelection<kThreads>::kInboxes);
        const KeptTokens of(params, blockIdx.z);
        const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y;
        int32_t* indices = params.indices + head * params.capacity;
        if (of.chosen > 0) {  // the same in all blocks: it depends on the row alone
            const PromptSelection<kThreads> selection = {histogram, group_sums, counters};
            selection.open_inboxes();
            announce_to_cluster();
            const uint32_t* row = params.keys + head * params.key_stride;
            const auto keys = PromptKeys<kKeys>::template of<kThreads>(row, of.votes);
            selection.clear_histogram();
            wait_for_cluster();
            __syncthreads();
            selection.emit(keys, selection.find_threshold(keys, of.chosen), indices);
        }
        const int32_t thread = cluster_rank() * kThreads + static_cast<int32_t>(threadIdx.x);
        of.write_rest(indices, params.capacity, thread, kClusterBlocks * kThreads);
        if (blockIdx.y == 0 && thread == 0) {
            params.cache_lengths[blockIdx.z] = of.kept;
        }
    }
}

}  // namespace kvc
