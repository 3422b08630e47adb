// The channels that score the pages of a KV head, and the query on them: steps 3, 4 and 6 of hybrid attention.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3. A[d] = sum over the group of |q[h,d]|; the r channels of largest A,
// the lower channel first among equals; a channel reads page maxima where the group's sum of q is positive, else minima;
// T[h] = sqrt(D part/whole), part and whole being the sums of |q[h,d]| over the chosen and over all channels.
//
// A channel's place is the number of channels before it: all of larger A, and the lower ones of equal A. Every warp
// ranks its own channels and lays them out in order; then each thread searches the other warps' lists.
// That takes 32 + 6 D/32 comparisons per channel instead of D, and one barrier.
//
// Order of sums: over the group, head 0 first, so that equal channels get equal bits at any position (the
// reference does the same). Channels are kept best first, as their places give them.
#pragma once

#include <cstdint>

#include "kernels/new_token.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"
#include "kvc/limits.h"

namespace kvc {

constexpr int kScoreThreads = 256;
constexpr int kScoreWarps = kScoreThreads / kWarpSize;
static_assert(kScoreThreads >= KVC_LARGEST_HEAD_SIZE, "one thread per channel");

// The query of one KV head's group, and the channels that it chose; in shared memory.
struct GroupQuery {
    SharedSpan<float> values;    // [g,D]
    SharedSpan<int32_t> chosen;  // [r]: rows of the bounds that the chosen channels read, best channel first
    int group;                   // g
    int head_size;               // D
    int channels;                // r

    // The channel whose maximum or negated minimum is in `row` of the bounds.
    __device__ __forceinline__ int channel_of(int row) const { return row < head_size ? row : row - head_size; }

    // The factor of the i-th best channel's bound for `head`: the query on that channel, negated where a minimum is
    // read as a negated maximum. 0 past the last channel and the last head.
    __device__ __forceinline__ float factor(int head, int i) const {
        const bool exists = head < group && i < channels;  // without a branch: all factors of a thread are read at once
        const int row = chosen[exists ? i : 0];
        const float value = values[(exists ? head : 0) * head_size + channel_of(row)];
        const float factor = row < head_size ? value : -value;
        return exists ? factor : 0.0f;
    }
};

// The importance of this thread's channel, and the row of its bounds.
struct QueryChannel {
    uint32_t key;  // ascends with A, below 2^31; 0 for NaN, and past the last channel
    int row;       // row of the bounds: d for the maximum, D+d for the negated minimum
};

// A is a sum of magnitudes: its bits ascend with it, and the sign bit is free.
__device__ __forceinline__ uint32_t importance_key(float importance) {
    return importance != importance ? 0 : __float_as_uint(importance) + 1;
}

// Reads query [g,D] on this thread's channel, in two steps: what else is read may be asked for between them. kHeads heads
// are under way together; with kAll a group has no more.
template <class T, int kHeads, bool kAll>
class GroupQueryReader {
public:
    // Starts to read the first heads.
    __device__ __forceinline__ GroupQueryReader(const HeadChannel<T>& channel, const T* __restrict__ query,
                                                const GroupQuery& to)
        : channel_(channel), query_(query), to_(to) {
        if (channel_.exists()) {
            read_from(0);
        }
    }

    // Fills `to.values` and returns the thread's channel. Where heads are rotated on the way, they are also written to
    // `rotated` [g,D], unless it is null. Every number goes to keep(place in [g,D], value) too.
    template <class Keep>
    __device__ __forceinline__ QueryChannel finish(T* __restrict__ rotated, const Keep& keep) {
        if (!channel_.exists()) {
            return {0, 0};
        }
        add_from(0, rotated, keep);
        if constexpr (!kAll) {
#pragma unroll 1
            for (int first = kHeads; first < to_.group; first += kHeads) {
                read_from(first);
                add_from(first, rotated, keep);
            }
        }
        const int d = channel_.number();
        return {importance_key(importance_), sum_ > 0.0f ? d : to_.head_size + d};  // a sum of exactly 0: the minimum
    }

private:
    __device__ __forceinline__ void read_from(int first) {
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            read_[i] = channel_.load(query_ + min(first + i, to_.group - 1) * to_.head_size);  // without a branch
        }
    }

    template <class Keep>
    __device__ __forceinline__ void add_from(int first, T* __restrict__ rotated, const Keep& keep) {
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            const int at = (first + i) * to_.head_size + channel_.number();
            read_[i].own = channel_.rotated(read_[i]);
            const float q = to_float(read_[i].own);
            if (first + i < to_.group) {
                keep(at, read_[i].own);
                to_.values[at] = q;
                importance_ += fabsf(q);
                sum_ += q;
            }
        }
        if (rotated != nullptr) {
#pragma unroll
            for (int i = 0; i < kHeads; ++i) {
                if (first + i < to_.group) {
                    rotated[(first + i) * to_.head_size + channel_.number()] = read_[i].own;
                }
            }
        }
    }

    const HeadChannel<T>& channel_;
    const T* query_;
    const GroupQuery& to_;
    typename HeadChannel<T>::Pair read_[kHeads]{};
    float importance_ = 0.0f;
    float sum_ = 0.0f;
};

// 1 if a < b, both below 2^31: a subtraction and a shift, where a comparison would cost a move more.
__device__ __forceinline__ int is_less(uint32_t a, uint32_t b) { return static_cast<int>((a - b) >> 31); }

// Place of this lane's key in the warp's descending order, the lower lane first among equals.
__device__ __forceinline__ int place_in_warp(uint32_t key, SharedSpan<uint32_t> keys) {
    keys[lane_index()] = key;
    __syncwarp();
    int place = 0;
#pragma unroll
    for (int vector = 0; vector < kWarpSize / 4; ++vector) {
        const uint4 others = keys.cast<uint4>()[vector];
        place += is_less(key, others.x) + is_less(key, others.y) + is_less(key, others.z) + is_less(key, others.w);
    }
    const uint32_t equal = __match_any_sync(kFullWarp, key);
    return place + __popc(equal & ((1u << lane_index()) - 1u));
}

// Adds kStep for each of kProbes elements of every list, kStep apart, that is >= limits[i]; they are read side by side.
template <int kStep, int kProbes, int kLists>
__device__ __forceinline__ void probe_lists(SharedSpan<uint32_t> lists, const uint32_t (&limits)[kLists],
                                            int (&counts)[kLists]) {
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
        const int first = list * kWarpSize + counts[list] + kStep - 1;
        int found = 0;
#pragma unroll
        for (int probe = 0; probe < kProbes; ++probe) {
            found += lists[first + probe * kStep] >= limits[list] ? 1 : 0;
        }
        counts[list] += found * kStep;
    }
}

// Number of elements >= limits[i] in each of kLists consecutive descending lists of 32. Three elements of a list are read
// at a time: half as many loads wait for one another as in a search by halves.
template <int kLists>
__device__ __forceinline__ void count_not_below(SharedSpan<uint32_t> lists, const uint32_t (&limits)[kLists],
                                                int (&counts)[kLists]) {
    static_assert(kWarpSize == 32, "three times 8, three times 2, and two");
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
        counts[list] = 0;
    }
    probe_lists<8, 3>(lists, limits, counts);
    probe_lists<2, 3>(lists, limits, counts);
    probe_lists<1, 2>(lists, limits, counts);
}

// Fills `query.chosen` and returns the place of this thread's channel, query.channels or more where it is not chosen. One
// barrier, and none after the result is written.
__device__ __forceinline__ int choose_channels(const QueryChannel& own, const GroupQuery& query) {
    constexpr int kSideBySide = 4;
    KVC_SHARED(uint32_t, keys, KVC_LARGEST_HEAD_SIZE);
    KVC_SHARED(uint32_t, lists, KVC_LARGEST_HEAD_SIZE);  // every warp's keys, descending
    const int warp = warp_index();
    const int used = (query.head_size + kWarpSize - 1) / kWarpSize;
    int place = 0;
    if (warp < used) {
        place = place_in_warp(own.key, keys.part(warp * kWarpSize, kWarpSize));
        lists[warp * kWarpSize + place] = own.key;
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= query.head_size) {
        return query.channels;
    }
    for (int first = 0; first < used; first += kSideBySide) {
        uint32_t limits[kSideBySide];
        int counts[kSideBySide];
#pragma unroll
        for (int i = 0; i < kSideBySide; ++i) {
            limits[i] = first + i < warp ? own.key : own.key + 1;  // equal keys of earlier warps come first
        }
        count_not_below(lists.part(first * kWarpSize, kSideBySide * kWarpSize), limits, counts);
#pragma unroll
        for (int i = 0; i < kSideBySide; ++i) {
            place += first + i < used && first + i != warp ? counts[i] : 0;  // lists past the last are undefined
        }
    }
    if (place < query.channels) {
        query.chosen[place] = own.row;
    }
    return place;
}

// 1/T of every head -> inverse_temperature [g]; one warp per head, the last warp first: the other results of the choice
// are given to the first warps. No barrier.
__device__ __forceinline__ void find_temperatures(const GroupQuery& query, float* inverse_temperature) {
    for (int head = kScoreWarps - 1 - warp_index(); head < query.group; head += kScoreWarps) {
        const int start = head * query.head_size;
        float whole = 0.0f;
#pragma unroll 4
        for (int d = lane_index(); d < query.head_size; d += kWarpSize) {
            whole += fabsf(query.values[start + d]);
        }
        float part = 0.0f;
#pragma unroll 2
        for (int i = lane_index(); i < query.channels; i += kWarpSize) {
            part += fabsf(query.values[start + query.channel_of(query.chosen[i])]);
        }
        whole = warp_sum(whole);
        part = warp_sum(part);
        if (lane_index() == 0) {
            const float share = part == 0.0f ? 1.0f : part / whole;
            inverse_temperature[head] = 1.0f / sqrtf(static_cast<float>(query.head_size) * share);
        }
    }
}

}  // namespace kvc
