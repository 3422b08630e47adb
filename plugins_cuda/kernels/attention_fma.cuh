// Attention of 8 query heads over tiles of 16 tokens by one warp, in plain fp32: for fp32 queries.
//
// 16 or 32 lanes hold a row by vectors of 4 channels; a butterfly sums each head's product over them, so that every
// lane of the row knows the score and adds its channels' share of the output. Several tokens are loaded at a time.
// The butterflies are the limit (5 shuffles per token and head): from 8 heads per group on they cost as much time as
// the loads. fp32 caches serve comparisons, not speed, so the simple form stays.
//
// In a format every lane widens what it loads: fp32 products then have the values that are read back, bit for bit.
//
// Deterministic: a fixed order of sums for every tile; no lane's result depends on another warp.
#pragma once

#include "kernels/attention_tile.cuh"

namespace kvc {

// kHeadSize is the head size rounded up to 64, 128 or 256.
template <int kHeadSize, class Formats>
class FmaWarp {
public:
    // Floats of shared memory of one tile: keys and values are in registers.
    static constexpr int kTileFloats = 0;

    // The warp's query heads [heads,D], at most 8.
    __device__ __forceinline__ FmaWarp(const float* query, int heads, int head_size, float scale, SharedSpan<float>,
                                       int)
        : scale_(scale), heads_(heads), head_size_(head_size) {
#pragma unroll
        for (int head = 0; head < kWarpHeads; ++head) {
            maximum_[head] = -INFINITY;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                load(head < heads, query + head * head_size, i, query_[head][i]);
            }
        }
    }

    __device__ __forceinline__ void attend(const TokenRows<float>& rows, TileRange tiles) {
        for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
            const int end = tile + kTileTokens < rows.end ? tile + kTileTokens : rows.end;
            for (int first = tile; first < end; first += kBatch * kRows) {
                attend_batch(rows, first);
            }
        }
    }

    // Maximum and sum of each head.
    __device__ __forceinline__ void store_parts(SharedSpan<SoftmaxPart> parts) {
#pragma unroll
        for (int head = 0; head < kWarpHeads; ++head) {
            const float sum = sum_rows(sum_[head]);
            if (lane_index() == 0) {
                parts[head] = {maximum_[head], sum};
            }
        }
    }

    // Outputs as [8][kOutputStride].
    __device__ __forceinline__ void store_output(SharedSpan<float> to) const {
        const SharedSpan<float4> vectors = to.template cast<float4>();
#pragma unroll
        for (int head = 0; head < kWarpHeads; ++head) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                float4 sum;
                sum.x = sum_rows(output_[head][i][0]);
                sum.y = sum_rows(output_[head][i][1]);
                sum.z = sum_rows(output_[head][i][2]);
                sum.w = sum_rows(output_[head][i][3]);
                if (row_of_lane() == 0) {
                    vectors[(head * kOutputStride<kHeadSize> + channel(i)) / 4] = sum;
                }
            }
        }
    }

private:
    static constexpr int kLanes = kHeadSize / 4 < kWarpSize ? kHeadSize / 4 : kWarpSize;  // lanes of a token's row
    static constexpr int kRows = kWarpSize / kLanes;                                      // rows of a warp at a time
    static constexpr int kVectors = kHeadSize / (4 * kLanes);                             // vectors of a row in a lane
    static constexpr int kBatch = 4 / kVectors;                                           // tokens of a row in flight

    __device__ __forceinline__ static int row_of_lane() { return lane_index() / kLanes; }
    __device__ __forceinline__ static int channel(int i) { return (i * kLanes + lane_index() % kLanes) * 4; }

    // Vector i of a row in this lane; zeros past the head size.
    __device__ __forceinline__ void load(bool wanted, const float* row, int i, float (&to)[4]) const {
        if (wanted && channel(i) < head_size_) {
            load_vector(row + channel(i), to);
        } else {
            to[0] = to[1] = to[2] = to[3] = 0.0f;
        }
    }

    __device__ __forceinline__ void attend_batch(const TokenRows<float>& rows, int first) {
        float keys[kBatch][kVectors][4], values[kBatch][kVectors][4];
        int tokens[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            tokens[j] = first + j * kRows + row_of_lane();
            load_row<Formats::kKeys>(rows, rows.keys, tokens[j], keys[j]);
            load_row<Formats::kValues>(rows, rows.values, tokens[j], values[j]);
        }
#pragma unroll
        for (int head = 0; head < kWarpHeads; ++head) {
            if (head < heads_) {
                float weights[kBatch];
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    const float score = multiply(query_[head], keys[j]);
                    weights[j] = tokens[j] < rows.end ? score * scale_ : -INFINITY;
                }
                add(head, weights, values);
            }
        }
    }

    // A token's key or value, as it is read back.
    template <VectorFormat kFormat>
    __device__ __forceinline__ void load_row(const TokenRows<float>& rows, const VectorTable& table, int token,
                                             float (&to)[kVectors][4]) const {
        const int slot = rows.slot(token);
        const char* const row = rows.template row_of_slot<kFormat>(table, slot, 0);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            if constexpr (kFormat == VectorFormat::kExact) {
                load(true, reinterpret_cast<const float*>(row), i, to[i]);
            } else if (channel(i) < head_size_) {
                const int group = min(channel(i) / kGroupChannels, table.groups - 1);
                constexpr int kCodesPerByte = kFormat == VectorFormat::kInt4 ? 2 : 1;
                widen_four<kFormat>(row + channel(i) / kCodesPerByte, read_numbers<kFormat>(table, slot, group), to[i]);
            } else {
                to[i][0] = to[i][1] = to[i][2] = to[i][3] = 0.0f;
            }
        }
    }

    // The product of a query head and a key, in all lanes of the row.
    __device__ __forceinline__ static float multiply(const float (&a)[kVectors][4], const float (&b)[kVectors][4]) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                sum += a[i][e] * b[i][e];
            }
        }
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(kFullWarp, sum, step);
        }
        return sum;
    }

    // Turns scores of a batch into weights and adds the weighted values to the output of one head.
    __device__ __forceinline__ void add(int head, float (&weights)[kBatch],
                                        const float (&values)[kBatch][kVectors][4]) {
        float maximum = maximum_[head];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            maximum = fmaxf(maximum, weights[j]);
        }
        if constexpr (kRows == 2) {
            maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, kLanes));
        }
        const float correction = softmax_weight(maximum_[head], maximum);
        maximum_[head] = maximum;
        sum_[head] *= correction;
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            weights[j] = softmax_weight(weights[j], maximum);
            sum_[head] += weights[j];
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float sum = output_[head][i][e] * correction;
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    sum += weights[j] * values[j][i][e];
                }
                output_[head][i][e] = sum;
            }
        }
    }

    // Sums over the rows that the warp holds at once.
    __device__ __forceinline__ static float sum_rows(float value) {
        if constexpr (kRows == 2) {
            value += __shfl_xor_sync(kFullWarp, value, kLanes);
        }
        return value;
    }

    float scale_;
    int heads_, head_size_;
    float query_[kWarpHeads][kVectors][4];
    float maximum_[kWarpHeads];
    float sum_[kWarpHeads] = {};
    float output_[kWarpHeads][kVectors][4] = {};
};

}  // namespace kvc
