// Attention of 8 query heads over tiles of 16 tokens by one warp, on tensor cores: for fp16 and bf16 caches.
//
// Keys and values go from global memory straight into mma fragments by 128-bit loads, with no shared memory between:
// - Scores are S^T[16 tokens, 8 heads] = K Q^T. A sum over channels may take them in any order, so a lane's 8
//   consecutive channels of a key row serve as the fragments of two products, if the query is loaded the same way.
// - Outputs are O^T[channels, 8 heads] += V^T P^T. A lane loads 8 consecutive channels of the 4 tokens whose weights
//   it holds, and pairs up tokens of one channel by byte permutation.
// - Between the two, weights change lanes: P^T has tokens where S^T has heads. Four shuffles per 16 tokens do that.
// Weights are split into two 16-bit numbers, so that they count with 16 (bf16) or 22 (fp16) bits, not with 8 or 11.
// (An infinite value in V therefore gives NaN where exact arithmetic may give an infinity.)
// A tile's 8 KB (D = 128) are all asked for before the first is used; other warps fill the wait between tiles.
//
// Deterministic: a fixed order of products for every tile; no lane's result depends on another warp.
#pragma once

#include "kernels/attention_tile.cuh"
#include "kernels/mma.cuh"

namespace kvc {

// Elements 0 and 1 of the pairs in two registers, as one register each.
__device__ __forceinline__ uint32_t lower_halves(uint32_t a, uint32_t b) { return (a & 0xffffu) | (b << 16); }
__device__ __forceinline__ uint32_t upper_halves(uint32_t a, uint32_t b) { return (a >> 16) | (b & 0xffff0000u); }

// P^T fragment half [tokens 2t, 2t+1][head group] from words [token group][heads 2t, 2t+1] (lane = 4 group + t).
__device__ __forceinline__ uint32_t transpose_weights(uint32_t word, int group, int t) {
    const uint32_t even = __shfl_sync(kFullWarp, word, 8 * t + group / 2);
    const uint32_t odd = __shfl_sync(kFullWarp, word, 8 * t + 4 + group / 2);
    return group % 2 == 0 ? lower_halves(even, odd) : upper_halves(even, odd);
}

// kHeadSize is the head size rounded up to 64, 128 or 256.
template <class T, int kHeadSize>
class TensorCoreWarp {
    // Channels that the four lanes of a quad load together, a vector of 8 each.
    static constexpr int kQuadChannels = 32;

public:
    // Floats of shared memory that a warp needs from its start until store_block.
    static constexpr int kScratch = kHeadSize / kQuadChannels * kWarpSize * 4;

    // The warp's query heads [heads,D], at most 8. They are kept in shared memory, where each lane reads what it has
    // written itself: registers are better used for keys and values that are on their way.
    __device__ __forceinline__ TensorCoreWarp(const T* query, int heads, int head_size, SharedSpan<float> scratch)
        : scale_(1.0f / sqrtf(static_cast<float>(head_size))),
          group_(thread_anew() % kWarpSize / 4),
          t_(thread_anew() % 4),
          query_(scratch.template cast<uint4>()) {
#pragma unroll
        for (int i = 0; i < kKeyVectors; ++i) {
            const int d = key_channel(i);
            const bool inside = group_ < heads && d < head_size;
            query_[i * kWarpSize + lane_index()] =
                inside ? platform::load_16_bytes(query + group_ * head_size + d) : uint4{0, 0, 0, 0};
        }
    }

    __device__ __forceinline__ void attend(const TokenRows<T>& rows, TileRange tiles) {
        for (int first = tiles.first; first < tiles.end; first += tiles.step) {
            load_keys(rows, first);
            load_values(rows, first);
            float scores[4];
            multiply_keys(scores);
            Weights weights;
            weigh(scores, first + group_, rows.end, weights);
            multiply_values(weights);
        }
    }

    // Maximum and sum of each head; the lanes of one head hold the sums over different tokens.
    __device__ __forceinline__ void store_parts(SharedSpan<SoftmaxPart> parts) {
        const int lane = thread_anew() % kWarpSize;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float sum = sum_groups(sum_[e]);
            if (lane < 4) {
                parts[2 * lane + e] = {maximum_[e], sum};
            }
        }
    }

    // Outputs of channels 64 block .. 64 block + 63 as [8][kBlockStride].
    __device__ __forceinline__ void store_block(int block, SharedSpan<float> to) const {
        const SharedSpan<float4> vectors = to.template cast<float4>();
        const float (&of)[4][4] = output_[block];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int first = ((2 * t_ + e) * kBlockStride + group_ * 8) / 4;
            vectors[first] = {of[0][e], of[0][2 + e], of[1][e], of[1][2 + e]};
            vectors[first + 1] = {of[2][e], of[2][2 + e], of[3][e], of[3][2 + e]};
        }
    }

private:
    static constexpr int kKeyVectors = kHeadSize / kQuadChannels;  // 16-byte vectors of one key row in a lane
    static constexpr int kSmallestHeadSize = kHeadSize == 64 ? 16 : kHeadSize / 2 + 8;
    static constexpr int kBlocks = kHeadSize / kBlockChannels;

    // P^T as B fragments: rounded, and what rounding left.
    struct Weights {
        uint32_t rounded[2];
        uint32_t rest[2];
    };

    __device__ __forceinline__ int key_channel(int i) const { return i * kQuadChannels + t_ * 8; }

    __device__ __forceinline__ void load_keys(const TokenRows<T>& rows, int first) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const T* row = rows.keys + rows.offset(rows.slot(first + group_ + 8 * half));
#pragma unroll
            for (int i = 0; i < kKeyVectors; ++i) {
                const int d = key_channel(i);
                const bool inside = kQuadChannels * (i + 1) <= kSmallestHeadSize || d < rows.head_size;
                keys_[half][i] = inside ? platform::load_16_bytes(row + d) : uint4{0, 0, 0, 0};
            }
        }
    }

    __device__ __forceinline__ void load_values(const TokenRows<T>& rows, int first) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const T* row = rows.values + rows.offset(rows.slot(first + 2 * t_ + i % 2 + i / 2 * 8));
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const int d = block * kBlockChannels + group_ * 8;  // past D: any channel, its output is dropped
                values_[block][i] = platform::load_16_bytes(row + (d < rows.head_size ? d : 0));
            }
        }
    }

    // Two sums, over even and odd products: half the latency of one chain.
    __device__ __forceinline__ void multiply_keys(float (&scores)[4]) const {
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int i = 0; i < kKeyVectors; ++i) {
            const uint4 upper = keys_[0][i], lower = keys_[1][i], query = query_[i * kWarpSize + lane_index()];
            mma_m16n8k16<T>(even, {upper.x, lower.x, upper.y, lower.y}, {query.x, query.y});
            mma_m16n8k16<T>(odd, {upper.z, lower.z, upper.w, lower.w}, {query.z, query.w});
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores[i] = (even[i] + odd[i]) * scale_;
        }
    }

    // Scores [tokens token, token + 8][heads 2t, 2t+1] into weights; what was summed up before is rescaled.
    __device__ __forceinline__ void weigh(float (&scores)[4], int token, int end, Weights& weights) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float upper = token < end ? scores[e] : -INFINITY;
            const float lower = token + 8 < end ? scores[2 + e] : -INFINITY;
            const float maximum = fmaxf(maximum_[e], maximum_groups(fmaxf(upper, lower)));
            const float correction = softmax_weight(maximum_[e], maximum);
            scores[e] = softmax_weight(upper, maximum);
            scores[2 + e] = softmax_weight(lower, maximum);
            sum_[e] = sum_[e] * correction + (scores[e] + scores[2 + e]);
            maximum_[e] = maximum;
            rescale(e, correction);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float a = scores[2 * half], b = scores[2 * half + 1];
            const float rest_a = a - to_float(from_float<T>(a)), rest_b = b - to_float(from_float<T>(b));
            weights.rounded[half] = transpose_weights(pack_pair<T>(a, b), group_, t_);
            weights.rest[half] = transpose_weights(pack_pair<T>(rest_a, rest_b), group_, t_);
        }
    }

    __device__ __forceinline__ void rescale(int e, float correction) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                output_[block][i][e] *= correction;
                output_[block][i][2 + e] *= correction;
            }
        }
    }

    __device__ __forceinline__ void multiply_values(const Weights& weights) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            uint32_t pairs[4][4];  // [token of the lane][pair of channels]
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 vector = values_[block][i];
                pairs[i][0] = vector.x;
                pairs[i][1] = vector.y;
                pairs[i][2] = vector.z;
                pairs[i][3] = vector.w;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t transposed[4] = {
                    lower_halves(pairs[0][i], pairs[1][i]), upper_halves(pairs[0][i], pairs[1][i]),
                    lower_halves(pairs[2][i], pairs[3][i]), upper_halves(pairs[2][i], pairs[3][i])};
                mma_m16n8k16<T>(output_[block][i], transposed, weights.rounded);
                mma_m16n8k16<T>(output_[block][i], transposed, weights.rest);
            }
        }
    }

    // Over the 8 lanes that hold the same heads.
    __device__ __forceinline__ static float maximum_groups(float value) {
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) {
            value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
        }
        return value;
    }
    __device__ __forceinline__ static float sum_groups(float value) {
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) {
            value += __shfl_xor_sync(kFullWarp, value, step);
        }
        return value;
    }

    float scale_;
    int group_, t_;
    SharedSpan<uint4> query_;                    // [vector][lane]
    uint4 keys_[2][kKeyVectors];                 // tokens group and group + 8 of the tile
    uint4 values_[kBlocks][4];                   // tokens 2t, 2t+1, 2t+8, 2t+9 of the tile
    float maximum_[2] = {-INFINITY, -INFINITY};  // of heads 2t, 2t+1
    float sum_[2] = {};
    // [block][i]: channels 64 block + 8 group + 2i, + 1 (upper and lower half) of heads 2t, 2t+1
    float output_[kBlocks][4][4] = {};
};

}  // namespace kvc
