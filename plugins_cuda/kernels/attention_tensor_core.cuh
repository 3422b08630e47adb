// Attention of 8 query heads over tiles of 16 tokens by one warp, on tensor cores: for fp16 and bf16 caches.
//
// Keys and values are copied to shared memory by cp.async, one or two tiles ahead (the ring), and from there into mma
// fragments. A lane copies its own operands, 16 bytes at a time, so a tile needs neither a barrier nor
// ldmatrix, and no bank is used twice:
// - Scores are S^T[16 tokens, 8 heads] = K Q^T. A sum over channels may take them in any order, so a lane's 8
//   consecutive channels of a key row serve as the fragments of two products, if the query is loaded the same way.
// - Outputs are O^T[channels, 8 heads] += V^T P^T. A lane copies 8 consecutive channels of the 4 tokens whose weights
//   it holds, and pairs up tokens of one channel by byte permutation.
// - Between the two, weights change lanes: P^T has tokens where S^T has heads. Four shuffles per 16 tokens do that.
// Weights are split into two 16-bit numbers, so that they count with 16 (bf16) or 22 (fp16) bits, not with 8 or 11.
// (An infinite value in V therefore gives NaN where exact arithmetic may give an infinity.)
// Later keys replace a tile's keys as soon as they are multiplied, then its values: between 4 and 8 KB of a ring
// of one tile (D = 128) are under way at any time.
//
// Deterministic: a fixed order of products for every tile; no lane's result depends on another warp, or on the ring.
#pragma once

#include "kernels/attention_tile.cuh"
#include "kernels/copy_async.cuh"
#include "kernels/mma.cuh"

namespace kvc {

// Elements 0 or 1 of the pairs in two registers, as one register: the bytes that __byte_perm takes.
inline constexpr uint32_t kLowerHalves = 0x5410, kUpperHalves = 0x7632;

// P^T fragment half [tokens 2t, 2t+1][head group] from words [token group][heads 2t, 2t+1] (lane = 4 group + t).
__device__ __forceinline__ uint32_t transpose_weights(uint32_t word, int group, int t) {
    const uint32_t even = __shfl_sync(kFullWarp, word, 8 * t + group / 2);
    const uint32_t odd = __shfl_sync(kFullWarp, word, 8 * t + 4 + group / 2);
    return __byte_perm(even, odd, group % 2 == 0 ? kLowerHalves : kUpperHalves);
}

// kHeadSize is the head size rounded up to 64, 128 or 256.
template <class T, int kHeadSize>
class TensorCoreWarp {
    // Channels that the four lanes of a quad take together, a vector of 8 each.
    static constexpr int kQuadChannels = 32;
    static constexpr int kBlockChannels = 64;  // of four products with the same weights
    static constexpr int kBlocks = kHeadSize / kBlockChannels;
    static constexpr int kKeyVectors = kHeadSize / kQuadChannels;         // 16-byte vectors of one key row in a lane
    static constexpr int kTileKeys = 2 * kKeyVectors;                     // vectors of a tile in a lane: first the keys
    static constexpr int kTileVectors = kTileKeys + 4 * kBlocks;          // ... then the values
    static constexpr int kTileSpan = (kTileVectors - 1) * kWarpSize + 1;  // from a lane's first vector to its last
    static constexpr int kSmallestHeadSize = kHeadSize == 64 ? 16 : kHeadSize / 2 + 8;

public:
    // Floats of shared memory of one tile.
    static constexpr int kTileFloats = kTileVectors * kWarpSize * 4;

    // The warp's query heads [heads,D], at most 8, and its ring of `stages` tiles (1 or 2).
    __device__ __forceinline__ TensorCoreWarp(const T* query, int heads, int head_size, float scale,
                                              SharedSpan<float> ring, int stages)
        : scale_(scale),
          stages_(stages),
          group_(thread_anew() % kWarpSize / 4),
          t_(thread_anew() % 4),
          key_room_(head_size - t_ * 8),
          value_room_(head_size - group_ * 8),
          ring_(own_vectors(ring.template cast<uint4>(), stages)) {
        const T* const row = query + (group_ * head_size + t_ * 8);
#pragma unroll
        for (int i = 0; i < kKeyVectors; ++i) {
            const bool inside = group_ < heads && i * kQuadChannels < key_room_;
            query_[i] = inside ? platform::load_16_bytes(row + i * kQuadChannels) : uint4{0, 0, 0, 0};
        }
    }

    __device__ __forceinline__ void attend(const TokenRows<T>& rows, TileRange tiles) {
        const int ahead = stages_ * tiles.step;
#pragma unroll 1
        for (int stage = 0; stage < stages_; ++stage) {
            copy_keys(rows, tiles.first + stage * tiles.step, stage);
            copy_values(rows, tiles.first + stage * tiles.step, stage);
        }
        int stage = 0;
#pragma unroll 1
        for (int first = tiles.first; first < tiles.end; first += tiles.step) {
            float scores[4];
            wait_for_oldest();
            multiply_keys(stage, scores);
            copy_keys(rows, first + ahead, stage);
            Weights weights;
            weigh(scores, first + group_, rows.end, weights);
            wait_for_oldest();
            multiply_values(stage, weights);
            copy_values(rows, first + ahead, stage);
            stage = stage + 1 < stages_ ? stage + 1 : 0;
        }
    }

    // Maximum and sum of each head; the lanes of one head hold the sums over different tokens.
    __device__ __forceinline__ void store_parts(SharedSpan<SoftmaxPart> parts) const {
        const int lane = thread_anew() % kWarpSize;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float sum = sum_groups(sum_[e]);
            if (lane < 4) {
                parts[2 * lane + e] = {maximum_[e], sum};
            }
        }
    }

    // Outputs as [8][kOutputStride], over the ring.
    __device__ __forceinline__ void store_output(SharedSpan<float> to) const {
        const SharedSpan<float4> vectors = to.template cast<float4>();
        const int lane = thread_anew() % kWarpSize, group = lane / 4, t = lane % 4;
        __syncwarp();  // the other lanes have read their values
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const float (&of)[4][4] = output_[block];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int first = ((2 * t + e) * kOutputStride<kHeadSize> + block * kBlockChannels + group * 8) / 4;
                vectors[first] = {of[0][e], of[0][2 + e], of[1][e], of[1][2 + e]};
                vectors[first + 1] = {of[2][e], of[2][2 + e], of[3][e], of[3][2 + e]};
            }
        }
    }

private:
    // P^T as B fragments: the rounded weights, and the remainder of the rounding.
    struct Weights {
        uint32_t rounded[2];
        uint32_t rest[2];
    };

    // This lane's vectors of the ring, kWarpSize apart, and those of one tile.
    __device__ __forceinline__ static SharedSpan<uint4> own_vectors(const SharedSpan<uint4>& ring, int stages) {
        return ring.part(thread_anew() % kWarpSize, kTileSpan + (stages - 1) * kTileVectors * kWarpSize);
    }
    __device__ __forceinline__ SharedSpan<uint4> vectors(int stage) const {
        return ring_.part(stage * kTileVectors * kWarpSize, kTileSpan);
    }

    // True if this lane's vector i of a key row, channels 32 i + 8 t and up, is inside the head.
    __device__ __forceinline__ bool has_key(int i) const {
        return kQuadChannels * (i + 1) <= kSmallestHeadSize || i * kQuadChannels < key_room_;
    }

    // True if this lane's vector of a value row in a block of channels is inside; if not, the output is dropped.
    __device__ __forceinline__ bool has_value(int block) const {
        return kBlockChannels * (block + 1) <= kSmallestHeadSize || block * kBlockChannels < value_room_;
    }

    // Tokens group and group + 8 of the tile.
    __device__ __forceinline__ void copy_keys(const TokenRows<T>& rows, int first, int stage) const {
        if (first < rows.end) {
            const SharedSpan<uint4> to = vectors(stage);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const T* row = rows.row(rows.keys, first + group_ + 8 * half, t_ * 8);
#pragma unroll
                for (int i = 0; i < kKeyVectors; ++i) {
                    if (has_key(i)) {
                        copy_async_16(&to[(half * kKeyVectors + i) * kWarpSize], row + i * kQuadChannels);
                    }
                }
            }
        }
        copy_async_commit();
    }

    // Tokens 2t, 2t+1, 2t+8 and 2t+9 of the tile.
    __device__ __forceinline__ void copy_values(const TokenRows<T>& rows, int first, int stage) const {
        if (first < rows.end) {
            const SharedSpan<uint4> to = vectors(stage);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const T* row = rows.row(rows.values, first + 2 * t_ + i % 2 + i / 2 * 8, group_ * 8);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    if (has_value(block)) {
                        copy_async_16(&to[(kTileKeys + block * 4 + i) * kWarpSize], row + block * kBlockChannels);
                    }
                }
            }
        }
        copy_async_commit();
    }

    // A tile is two groups of copies, its keys and its values. Of the ring's groups all but the oldest may be under way.
    __device__ __forceinline__ void wait_for_oldest() const {
        if (stages_ == 1) {
            copy_async_wait<1>();
        } else {
            copy_async_wait<3>();
        }
    }

    // Two sums, over even and odd products: half the latency of one chain.
    __device__ __forceinline__ void multiply_keys(int stage, float (&scores)[4]) const {
        const SharedSpan<uint4> keys = vectors(stage);
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int i = 0; i < kKeyVectors; ++i) {
            const uint4 upper = has_key(i) ? keys[i * kWarpSize] : uint4{0, 0, 0, 0};
            const uint4 lower = has_key(i) ? keys[(kKeyVectors + i) * kWarpSize] : uint4{0, 0, 0, 0};
            mma_m16n8k16<T>(even, {upper.x, lower.x, upper.y, lower.y}, {query_[i].x, query_[i].y});
            mma_m16n8k16<T>(odd, {upper.z, lower.z, upper.w, lower.w}, {query_[i].z, query_[i].w});
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores[i] = (even[i] + odd[i]) * scale_;
        }
    }

    // Turns scores [tokens token, token + 8][heads 2t, 2t+1] into weights and rescales the sums so far.
    __device__ __forceinline__ void weigh(float (&scores)[4], int token, int end, Weights& weights) {
        float corrections[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float upper = token < end ? scores[e] : -INFINITY;
            const float lower = token + 8 < end ? scores[2 + e] : -INFINITY;
            const float maximum = fmaxf(maximum_[e], maximum_groups(fmaxf(upper, lower)));
            corrections[e] = softmax_weight(maximum_[e], maximum);
            scores[e] = softmax_weight(upper, maximum);
            scores[2 + e] = softmax_weight(lower, maximum);
            sum_[e] = sum_[e] * corrections[e] + (scores[e] + scores[2 + e]);
            maximum_[e] = maximum;
        }
        if (__any_sync(kFullWarp, corrections[0] != 1.0f || corrections[1] != 1.0f)) {  // seldom, after a few tiles
            rescale(corrections);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float a = scores[2 * half], b = scores[2 * half + 1];
            const uint32_t rounded = pack_pair<T>(a, b);
            T pair[2];
            memcpy(pair, &rounded, sizeof pair);
            const uint32_t rest = pack_pair<T>(a - to_float(pair[0]), b - to_float(pair[1]));
            weights.rounded[half] = transpose_weights(rounded, group_, t_);
            weights.rest[half] = transpose_weights(rest, group_, t_);
        }
    }

    __device__ __forceinline__ void rescale(const float (&corrections)[2]) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    output_[block][i][e] *= corrections[e % 2];
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_values(int stage, const Weights& weights) {
        const SharedSpan<uint4> tile = vectors(stage);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            uint32_t pairs[4][4];  // [token of the lane][pair of channels]
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 values = tile[(kTileKeys + block * 4 + i) * kWarpSize];
                pairs[i][0] = values.x;
                pairs[i][1] = values.y;
                pairs[i][2] = values.z;
                pairs[i][3] = values.w;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t transposed[4] = {__byte_perm(pairs[0][i], pairs[1][i], kLowerHalves),
                                                __byte_perm(pairs[0][i], pairs[1][i], kUpperHalves),
                                                __byte_perm(pairs[2][i], pairs[3][i], kLowerHalves),
                                                __byte_perm(pairs[2][i], pairs[3][i], kUpperHalves)};
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
    int stages_, group_, t_;
    int key_room_, value_room_;  // channels from the lane's first one of a key or value row to the end of the head
    SharedSpan<uint4> ring_;     // of this lane: [stage][vector], kWarpSize apart
    uint4 query_[kKeyVectors];   // of head `group`
    // Of heads 2t, 2t+1.
    float maximum_[2] = {-INFINITY, -INFINITY};
    float sum_[2] = {};
    // [block][i]: channels 64 block + 8 group + 2i, + 1 (upper and lower half) of heads 2t, 2t+1
    float output_[kBlocks][4][4] = {};
};

}  // namespace kvc
