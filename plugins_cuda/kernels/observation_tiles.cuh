// The inner product of the observation scores: a warp's tile of keys against 16 query rows at a time.
//
// Both tiles give a lane the same logits, in the layout of an mma.m16n8k16 accumulator: for each group of 8 keys,
// logits[group][0..1] belong to query row lane / 4, logits[group][2..3] to row lane / 4 + 8, and to keys 2 * (lane %
// 4) and 2 * (lane % 4) + 1 of the group. So the passes do not know which tile they use.
//
//   KeyTile<T, n>     fp16 and bf16, tensor cores, up to 32 n channels. Keys stay in registers, as the B operand.
//   KeyTile<float, 0> fp32, scalar multiply-adds, any head size. Keys stay in the warp's shared memory.
//
// The order of channels does not matter to a dot product, so lane t of a quad takes channels 8t..8t+7 of every 32 as
// the slots (2t, 2t+1, 2t+8, 2t+9) of two k-steps, for keys and queries alike. Hence keys come from global memory
// straight into operand registers by 128-bit loads, 64 contiguous bytes of 8 keys each, without shared memory or a
// barrier. Queries are in shared memory in operand order: one 128-bit read without bank conflicts is an A operand.
// Channels past D are zeros on both sides.
//
// Determinism: a logit is the same chain of operations for every key of a tile.
#pragma once

#include <cstdint>

#include "kernels/copy_async.cuh"
#include "kernels/mma.cuh"
#include "kernels/numeric.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

namespace kvc {

constexpr int kQueryTile = 16;  // query rows of one product
constexpr int kKeyGroup = 8;    // keys of one product
constexpr int kQuad = 4;        // lanes that share the query rows of a product

__device__ __forceinline__ int quad_of_lane() { return lane_index() / kQuad; }
__device__ __forceinline__ int lane_of_quad() { return lane_index() % kQuad; }

// Keys `first`..`first + kKeys - 1` of one head; a key past `last` is loaded as `last`, and its logits must be
// ignored.
template <class T>
struct KeyRows {
    const T* keys;         // [.., D], D contiguous
    int64_t stride_token;  // elements between keys
    int64_t first;
    int64_t last;
    int32_t head_size;  // D

    __device__ __forceinline__ const T* key(int offset) const {
        return keys + min(first + offset, last) * stride_token;
    }
};

template <class T, int kChannelBlocks>
class KeyTile {
public:
    using Vector = uint4;
    static constexpr int kWarps = 8;
    static constexpr int kGroups = kChannelBlocks > 4 ? 2 : 4;  // 64 registers of keys at most
    static constexpr int kKeys = kGroups * kKeyGroup;

    // 16-byte vectors of a query row in shared memory.
    static constexpr __host__ __device__ int query_vectors(int) { return kChannelBlocks * kVectorsPerBlock; }
    // 16-byte vectors of a warp's keys in shared memory.
    static constexpr __host__ __device__ int key_vectors(int) { return 0; }

    // Stores vector `vector` of query rows `row` and row + 8 (`row` in the upper half of a product): two A operands.
    static __device__ __forceinline__ void store_queries(SharedSpan<uint4> queries, int row, int vector, int,
                                                         const uint4& upper, const uint4& lower) {
        const int lane = row % kKeyGroup * kQuad + vector % kVectorsPerBlock;
        const int slot = operand_slot(row / kQueryTile, vector / kVectorsPerBlock, lane);
        queries[slot] = make_uint4(upper.x, lower.x, upper.y, lower.y);
        queries[slot + kWarpSize] = make_uint4(upper.z, lower.z, upper.w, lower.w);
    }

    __device__ __forceinline__ KeyTile(SharedSpan<uint4>, int) {}

    // All lanes of a warp.
    __device__ __forceinline__ void load(const KeyRows<T>& rows) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const T* key = rows.key(group * kKeyGroup + quad_of_lane());
#pragma unroll
            for (int block = 0; block < kChannelBlocks; ++block) {
                const int channel = (block * kVectorsPerBlock + lane_of_quad()) * kVectorWidth<T>;
                keys_[group][block] = channel < rows.head_size ? platform::load_16_bytes(key + channel) : uint4{};
            }
        }
    }

    // Adds the keys' dot products with query rows 16 `tile`..16 `tile` + 15.
    __device__ __forceinline__ void multiply(SharedSpan<uint4> queries, int tile, float (&logits)[kGroups][4]) const {
#pragma unroll
        for (int block = 0; block < kChannelBlocks; ++block) {
            const int slot = operand_slot(tile, block, lane_index());
            const uint4 first = queries[slot], second = queries[slot + kWarpSize];
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                const uint4& key = keys_[group][block];
                mma_m16n8k16<T>(logits[group], {first.x, first.y, first.z, first.w}, {key.x, key.y});
            }
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                const uint4& key = keys_[group][block];
                mma_m16n8k16<T>(logits[group], {second.x, second.y, second.z, second.w}, {key.z, key.w});
            }
        }
    }

private:
    static constexpr int kVectorsPerBlock = 4;  // 32 channels

    // The operand of the first k-step of a block of channels; that of the second is kWarpSize further on.
    static __device__ __forceinline__ int operand_slot(int tile, int block, int lane) {
        return (tile * kChannelBlocks + block) * 2 * kWarpSize + lane;
    }

    uint4 keys_[kGroups][kChannelBlocks];
};

template <>
class KeyTile<float, 0> {
public:
    using Vector = float4;
    static constexpr int kWarps = 4;
    static constexpr int kGroups = 2;
    static constexpr int kKeys = kGroups * kKeyGroup;

    static constexpr __host__ __device__ int query_vectors(int head_size) { return head_size / 4; }
    static constexpr __host__ __device__ int key_vectors(int head_size) { return kKeys * head_size / 4; }

    static __device__ __forceinline__ void store_queries(SharedSpan<float4> queries, int row, int vector, int head_size,
                                                         const float4& upper, const float4& lower) {
        queries[query_slot(row, vector, head_size)] = upper;
        queries[query_slot(row + kKeyGroup, vector, head_size)] = lower;
    }

    __device__ __forceinline__ KeyTile(SharedSpan<float4> keys, int head_size)
        : keys_(keys), vectors_(query_vectors(head_size)) {}

    // All lanes of a warp; the keys of the tile before are overwritten. Eight lanes take one vector each of 8 keys:
    // neither side has bank conflicts, and a key's 4 vectors are contiguous in global memory.
    __device__ __forceinline__ void load(const KeyRows<float>& rows) {
        const int lane = lane_index();
        __syncwarp();
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const float* key = rows.key(group * kKeyGroup + lane % kKeyGroup);
            for (int vector = lane / kKeyGroup; vector < vectors_; vector += kQuad) {
                copy_async_16(&keys_[slot(group, vector, lane % kKeyGroup)], key + 4 * vector);
            }
        }
        copy_async_commit();
        copy_async_wait<0>();
        __syncwarp();
    }

    __device__ __forceinline__ void multiply(SharedSpan<float4> queries, int tile, float (&logits)[kGroups][4]) const {
        const int upper_row = tile * kQueryTile + quad_of_lane();
        for (int vector = 0; vector < vectors_; ++vector) {
            const float4 upper = queries[query_slot(upper_row, vector, 4 * vectors_)];
            const float4 lower = queries[query_slot(upper_row + kKeyGroup, vector, 4 * vectors_)];
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float4 key = keys_[slot(group, vector, 2 * lane_of_quad() + i)];
                    add_products(logits[group][i], upper, key);
                    add_products(logits[group][i + 2], lower, key);
                }
            }
        }
    }

private:
    static __device__ __forceinline__ int query_slot(int row, int vector, int head_size) {
        return (row / kKeyGroup * query_vectors(head_size) + vector) * kKeyGroup + row % kKeyGroup;
    }

    __device__ __forceinline__ int slot(int group, int vector, int key) const {
        return (group * vectors_ + vector) * kKeyGroup + key;
    }

    static __device__ __forceinline__ void add_products(float& sum, const float4& a, const float4& b) {
        sum += a.x * b.x;
        sum += a.y * b.y;
        sum += a.z * b.z;
        sum += a.w * b.w;
    }

    SharedSpan<float4> keys_;  // [group, vector, key]
    int vectors_;
};

}  // namespace kvc
