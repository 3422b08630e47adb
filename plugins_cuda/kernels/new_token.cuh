// The new token of every row of a decode step: the places of its query, key and value, and how a thread reads its
// channel of them, with the rotary embedding where they do not have it yet.
//
// Source: Su et al. (arXiv 2104.09864). The two halves of a head form the pairs. For d < D/2, rotated channel d is
// x[d] cos[d] - x[d + D/2] sin[d], and channel d + D/2 is x[d + D/2] cos[d] + x[d] sin[d]. In fp32: both products and their
// sum are rounded, then the result is rounded to T.
//
// A pure function of a row's own values: a row has the same bits alone and in any batch.
#pragma once

#include <cstdint>

#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"

namespace kvc {

// Rows of the query are `query_row` elements apart, those of key and value `entry_row`.
template <class T>
struct NewToken {
    const T* query;  // [B,H,D]
    const T* key;    // [B,G,D]
    const T* value;  // [B,G,D]
    int64_t query_row;
    int64_t entry_row;
    const float* cosines;  // [B,D/2], of the row's position; or null: query and key are rotated already
    const float* sines;    // [B,D/2]
    T* rotated;            // [B,H,D]: receives the rotated query; null where `cosines` is
};

// This thread's channel of a row's heads; channel d has thread d.
template <class T>
class HeadChannel {
public:
    // A head on the channel, and on the other channel of the pair where the head is to be rotated.
    struct Pair {
        T own;
        T other;
    };

    // Starts to read the angle.
    __device__ __forceinline__ HeadChannel(const NewToken<T>& token, int64_t row, int head_size)
        : channel_(static_cast<int>(threadIdx.x)), exists_(channel_ < head_size) {
        if (exists_ && token.cosines != nullptr) {
            const int half = head_size / 2;
            const bool second = channel_ >= half;
            to_other_ = second ? -half : half;
            const int64_t angle = row * half + (second ? channel_ - half : channel_);
            cosine_ = token.cosines[angle];
            const float sine = token.sines[angle];
            sine_ = second ? sine : -sine;
        }
    }

    // True if a head has the channel.
    __device__ __forceinline__ bool exists() const { return exists_; }
    __device__ __forceinline__ int number() const { return channel_; }

    // Starts to read a head [D] that has the channel.
    __device__ __forceinline__ Pair load(const T* head) const {
        return {head[channel_], to_other_ != 0 ? head[channel_ + to_other_] : T{}};
    }

    // The number that was read, rotated where it has to be.
    __device__ __forceinline__ T rotated(const Pair& pair) const {
        if (to_other_ == 0) {
            return pair.own;
        }
        // Not contracted to a fused product and sum, which would give other bits than the formula.
        return from_float<T>(__fadd_rn(__fmul_rn(to_float(pair.own), cosine_), __fmul_rn(to_float(pair.other), sine_)));
    }

private:
    int channel_;
    bool exists_;
    int to_other_ = 0;  // elements to the other channel; 0 where nothing is rotated
    float cosine_ = 1.0f;
    float sine_ = 0.0f;  // negated in the first half
};

// Rotates the channel of a group's heads [g,D]. Loads of several heads are under way together.
template <class T>
__device__ __forceinline__ void rotate_heads(const HeadChannel<T>& channel, const T* __restrict__ heads,
                                             T* __restrict__ rotated, int group, int head_size) {
    constexpr int kInFlight = 4;
    if (!channel.exists()) {
        return;
    }
#pragma unroll 1
    for (int first = 0; first < group; first += kInFlight) {
        typename HeadChannel<T>::Pair read[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (first + i < group) {
                read[i] = channel.load(heads + (first + i) * head_size);
            }
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (first + i < group) {
                rotated[(first + i) * head_size + channel.number()] = channel.rotated(read[i]);
            }
        }
    }
}

}  // namespace kvc
