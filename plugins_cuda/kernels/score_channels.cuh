// Which channels score the pages of a KV head, and the query on them: steps 3, 4 and 6 of RocketKV's hybrid attention.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3. A[d] = sum over the group of |q[h,d]|; the r channels of largest A,
// the lower channel first among equals; a channel reads page maxima where the group's sum of q is positive, else minima;
// T[h] = sqrt(D part/whole), part and whole being the sums of |q[h,d]| over the chosen and over all channels.
//
// A rank count gives each channel its place: channel d stands behind all d' with A[d'] > A[d], and behind d' < d with
// A[d'] = A[d]. That is exact, needs one barrier, and is D²/threads comparisons per thread: 64 at D = 128. So every
// block of the grid does it for itself, rather than wait for a launch that does it once.
//
// Order of sums: over the group, head 0 first, so that equal channels get equal bits wherever they stand (the
// reference does the same). Channels are kept best first, as the rank gives them.
#pragma once

#include <cstdint>

#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

namespace kvc {

constexpr int kMaxHeadSize = 256;
constexpr int kMaxGroup = 16;
constexpr int kScoreThreads = 256;
static_assert(kScoreThreads >= kMaxHeadSize, "one thread per channel");

// The query of one KV head's group, and what follows from it; in shared memory.
struct GroupQuery {
    SharedSpan<float> values;        // [g,D]
    SharedSpan<uint32_t> keys;       // [D]: order keys of A
    SharedSpan<int32_t> bound_rows;  // [D]: row of the bounds that the channel reads, d or D+d
    SharedSpan<int32_t> chosen;      // [r]: bound_rows of the chosen channels, best first
    SharedSpan<float> temperature;   // [g]
    int group;                       // g
    int head_size;                   // D
    int channels;                    // r

    // The channel of which `row` of the bounds is the maximum or the negated minimum.
    __device__ __forceinline__ int channel_of(int row) const { return row < head_size ? row : row - head_size; }
};

// Fills values, keys and bound_rows from query [g,D]. No barrier: the caller's next one makes them visible.
template <class T>
__device__ __forceinline__ void read_query(const T* __restrict__ query, const GroupQuery& to) {
    const int d = static_cast<int>(threadIdx.x);
    if (d >= to.head_size) {
        return;
    }
    float importance = 0.0f;
    float sum = 0.0f;
#pragma unroll 4
    for (int head = 0; head < to.group; ++head) {
        const float q = to_float(query[head * to.head_size + d]);
        to.values[head * to.head_size + d] = q;
        importance += fabsf(q);
        sum += q;
    }
    to.keys[d] = order_key(importance);
    to.bound_rows[d] = sum > 0.0f ? d : to.head_size + d;  // a sum of exactly 0 takes the minimum
}

// Threads that share the rank count of one channel: a power of two, so that they are neighbours within a warp.
__device__ __forceinline__ int threads_per_channel(int head_size) {
    int threads = 1;
    while (2 * threads * head_size <= kScoreThreads) {
        threads *= 2;
    }
    return threads;
}

// Fills `chosen`. No barrier.
__device__ __forceinline__ void choose_channels(const GroupQuery& query) {
    const int sharing = threads_per_channel(query.head_size);
    const int channel = static_cast<int>(threadIdx.x) / sharing;
    const int first = static_cast<int>(threadIdx.x) % sharing;
    int rank = 0;
    if (channel < query.head_size) {
        const uint32_t own = query.keys[channel];
        int other = first;
        for (; other < channel; other += sharing) {
            rank += query.keys[other] >= own;
        }
        for (; other < query.head_size; other += sharing) {
            rank += query.keys[other] > own;
        }
    }
    for (int step = sharing / 2; step > 0; step /= 2) {
        rank += __shfl_xor_sync(0xffffffffu, rank, step);
    }
    if (channel < query.head_size && first == 0 && rank < query.channels) {
        query.chosen[rank] = query.bound_rows[channel];
    }
}

// Fills `temperature`; one warp per head. No barrier.
__device__ __forceinline__ void find_temperatures(const GroupQuery& query) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int head = static_cast<int>(threadIdx.x) / 32; head < query.group; head += kScoreThreads / 32) {
        const int start = head * query.head_size;
        float whole = 0.0f;
        for (int d = lane; d < query.head_size; d += 32) {
            whole += fabsf(query.values[start + d]);
        }
        float part = 0.0f;
        for (int i = lane; i < query.channels; i += 32) {
            part += fabsf(query.values[start + query.channel_of(query.chosen[i])]);
        }
        whole = warp_sum(whole);
        part = warp_sum(part);
        if (lane == 0) {
            const float share = part == 0.0f ? 1.0f : part / whole;
            query.temperature[head] = sqrtf(static_cast<float>(query.head_size) * share);
        }
    }
}

}  // namespace kvc
