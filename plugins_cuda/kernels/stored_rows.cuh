// Whole rows of vectors in a format: a prompt's kept tokens and a turn's new ones stored, stored ones moved, and both
// widened. A warp takes a vector at a time; codes that are stored already are moved, never made anew.
//
//   gather_in_format        the kept rows of exact keys and values into consecutive slots, zeros past a row's end
//   gather_stored           the same for rows that are stored already
//   append_block_in_format  token i of row b goes to slot cache_lengths[b] + i; a token without a slot is dropped
//   join_block_in_format    the stored entries, then the new ones, then zeros
//   widen_vectors           vectors as they are read back, in fp32
//
// Bytes: every vector is read once and written once. Determinism: every element has one writer.
#pragma once

#include <cstdint>

#include "kernels/block_rows.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"
#include "kernels/stored_vector.cuh"

namespace kvc {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarpSize;
constexpr int kRowsOfBlock = 32;

// Eight channels of an exact vector [D] in each lane; zeros past the head.
template <class T>
__device__ __forceinline__ void load_lane_channels(const T* vector, int head_size, float (&channels)[kLaneChannels]) {
    const int first = lane_index() * kLaneChannels;
#pragma unroll
    for (int i = 0; i < kLaneChannels; i += kVectorWidth<T>) {
        float part[kVectorWidth<T>] = {};
        if (first < head_size) {
            load_vector(vector + first + i, part);
        }
#pragma unroll
        for (int j = 0; j < kVectorWidth<T>; ++j) {
            channels[i + j] = part[j];
        }
    }
}

template <class T>
__device__ __forceinline__ void store_row(const T* vector, int head_size, const VectorTable& to) {
    float channels[kLaneChannels];
    load_lane_channels(vector, head_size, channels);
    store_vector(channels, head_size, to);
}

// Copies a stored vector, or clears it where `from` is null.
__device__ __forceinline__ void move_vector(const VectorTable* from, const VectorTable& to) {
    const int lane = lane_index();
    if (lane < to.code_bytes / 4) {
        static_cast<uint32_t*>(to.codes)[lane] = from == nullptr ? 0 : static_cast<const uint32_t*>(from->codes)[lane];
    }
    if (lane + kWarpSize < to.code_bytes / 4) {
        const int word = lane + kWarpSize;
        static_cast<uint32_t*>(to.codes)[word] = from == nullptr ? 0 : static_cast<const uint32_t*>(from->codes)[word];
    }
    if (lane >= to.groups) {
        return;
    }
    if (to.format == VectorFormat::kFp8) {
        static_cast<uint8_t*>(to.scales)[lane] =
            from == nullptr ? uint8_t{0} : static_cast<const uint8_t*>(from->scales)[lane];
    } else {
        static_cast<uint16_t*>(to.scales)[lane] =
            from == nullptr ? uint16_t{0} : static_cast<const uint16_t*>(from->scales)[lane];
    }
    if (to.format == VectorFormat::kInt4) {
        to.minima[lane] = from == nullptr ? half_t{} : from->minima[lane];
    }
}

// Moves vector `at` of one table to vector `slot` of another.
__device__ __forceinline__ void move_row(const VectorTable& from, int64_t at, const VectorTable& to, int64_t slot) {
    const VectorTable source = from.from(at);
    move_vector(&source, to.from(slot));
}

// Calls visit(i) for the rows first..end - 1 of this warp.
template <class Visit>
__device__ __forceinline__ void for_rows_of_warp(int64_t first, int64_t end, const Visit& visit) {
    for (int64_t row = first + warp_index(); row < end; row += kRowWarps) {
        visit(row);
    }
}

template <class T>
struct GatherInFormatParams {
    const T* k;  // [B,G,S,D] by strides
    const T* v;
    VectorTable keys;              // [B,G,C,.]
    VectorTable values;            // [B,G,C,.]
    const int32_t* indices;        // [B,G,C]: position in k and v of each slot, ascending
    const int64_t* cache_lengths;  // [B]: slots in use
    int64_t stride_batch;          // of k and v, in elements
    int64_t stride_head;
    int64_t stride_token;
    int32_t kv_heads;   // G
    int32_t head_size;  // D
    int32_t capacity;   // C
};

// Grid (ceil(C / kRowsOfBlock), G, B).
template <class T>
__global__ void __launch_bounds__(kRowThreads) gather_in_format(const GatherInFormatParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y, slots = head * params.capacity;
    const int64_t source = blockIdx.z * params.stride_batch + blockIdx.y * params.stride_head;
    const int64_t length = params.cache_lengths[blockIdx.z];
    const int64_t first = int64_t{blockIdx.x} * kRowsOfBlock;
    for_rows_of_warp(first, min(first + kRowsOfBlock, int64_t{params.capacity}), [&](int64_t slot) {
        const VectorTable key = params.keys.from(slots + slot), value = params.values.from(slots + slot);
        if (slot < length) {
            const int64_t from = source + params.indices[slots + slot] * params.stride_token;
            store_row(params.k + from, params.head_size, key);
            store_row(params.v + from, params.head_size, value);
        } else {
            move_vector(nullptr, key);
            move_vector(nullptr, value);
        }
    });
}

struct GatherStoredParams {
    VectorTable k;       // [B,G,S,.]
    VectorTable v;       // [B,G,S,.]
    VectorTable keys;    // [B,G,C,.]
    VectorTable values;  // [B,G,C,.]
    const int32_t* indices;
    const int64_t* cache_lengths;
    int64_t stored;    // S
    int32_t kv_heads;  // G
    int32_t capacity;  // C
};

// Grid (ceil(C / kRowsOfBlock), G, B).
inline __global__ void __launch_bounds__(kRowThreads) gather_stored(const GatherStoredParams params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y, slots = head * params.capacity;
    const int64_t length = params.cache_lengths[blockIdx.z];
    const int64_t first = int64_t{blockIdx.x} * kRowsOfBlock;
    for_rows_of_warp(first, min(first + kRowsOfBlock, int64_t{params.capacity}), [&](int64_t slot) {
        if (slot < length) {
            const int64_t from = head * params.stored + params.indices[slots + slot];
            move_row(params.k, from, params.keys, slots + slot);
            move_row(params.v, from, params.values, slots + slot);
        } else {
            move_vector(nullptr, params.keys.from(slots + slot));
            move_vector(nullptr, params.values.from(slots + slot));
        }
    });
}

template <class T>
struct BlockInFormatParams {
    const T* k_new;      // [B,G,M,D]
    const T* v_new;      // [B,G,M,D]
    VectorTable keys;    // [B,G,C,.]
    VectorTable values;  // [B,G,C,.]
    VectorTable k;       // [B,G,C+M,.], of a join
    VectorTable v;
    const int64_t* cache_lengths;
    const int64_t* lengths;
    int64_t* joined_lengths;  // [B], of a join
    int64_t capacity;         // C
    int64_t block;            // M
    int32_t kv_heads;         // G
    int32_t head_size;        // D
};

// Grid (ceil(M / kRowsOfBlock), G, B).
template <class T>
__global__ void __launch_bounds__(kRowThreads) append_block_in_format(const BlockInFormatParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const BlockRow row = block_row(params.cache_lengths, params.lengths, blockIdx.z, params.capacity, params.block);
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y;
    const int64_t first = int64_t{blockIdx.x} * kRowsOfBlock;
    const int64_t end = min(first + kRowsOfBlock, min(row.count, params.capacity - row.stored));
    for_rows_of_warp(first, end, [&](int64_t token) {
        const int64_t from = (head * params.block + token) * params.head_size;
        const int64_t slot = head * params.capacity + row.stored + token;
        store_row(params.k_new + from, params.head_size, params.keys.from(slot));
        store_row(params.v_new + from, params.head_size, params.values.from(slot));
    });
}

// Grid (ceil((C + M) / kRowsOfBlock), G, B).
template <class T>
__global__ void __launch_bounds__(kRowThreads) join_block_in_format(const BlockInFormatParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const BlockRow row = block_row(params.cache_lengths, params.lengths, blockIdx.z, params.capacity, params.block);
    const int64_t head = int64_t{blockIdx.z} * params.kv_heads + blockIdx.y;
    const int64_t entries = params.capacity + params.block, first = int64_t{blockIdx.x} * kRowsOfBlock;
    for_rows_of_warp(first, min(first + kRowsOfBlock, entries), [&](int64_t entry) {
        const int64_t to = head * entries + entry;
        if (entry < row.stored) {
            move_row(params.keys, head * params.capacity + entry, params.k, to);
            move_row(params.values, head * params.capacity + entry, params.v, to);
        } else if (entry < row.stored + row.count) {
            const int64_t from = (head * params.block + entry - row.stored) * params.head_size;
            store_row(params.k_new + from, params.head_size, params.k.from(to));
            store_row(params.v_new + from, params.head_size, params.v.from(to));
        } else {
            move_vector(nullptr, params.k.from(to));
            move_vector(nullptr, params.v.from(to));
        }
    });
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        params.joined_lengths[blockIdx.z] = row.stored + row.count;
    }
}

// One channel of a stored vector, as it is read back.
__device__ __forceinline__ float read_channel(const VectorTable& vector, int channel) {
    const auto* const codes = static_cast<const uint8_t*>(vector.codes);
    const int group = min(channel / kGroupChannels, vector.groups - 1);
    if (vector.format == VectorFormat::kInt8) {
        return static_cast<float>(static_cast<int8_t>(codes[channel])) *
               scale_of<VectorFormat::kInt8>(read_numbers<VectorFormat::kInt8>(vector, 0, group));
    }
    if (vector.format == VectorFormat::kFp8) {
        return stored::e4m3_number(codes[channel]) *
               scale_of<VectorFormat::kFp8>(read_numbers<VectorFormat::kFp8>(vector, 0, group));
    }
    const VectorNumbers numbers = read_numbers<VectorFormat::kInt4>(vector, 0, group);
    const auto code = static_cast<float>(codes[channel / 2] >> channel % 2 * 4 & 0xf);
    return code * scale_of<VectorFormat::kInt4>(numbers) + minimum_of(numbers);
}

template <class T>
struct WidenParams {
    VectorTable vectors;  // of T where they are exact
    float* to;            // [count,D]
    int64_t count;
    int32_t head_size;
};

// Grid (ceil(count / kRowsOfBlock)).
template <class T>
__global__ void __launch_bounds__(kRowThreads) widen_vectors(const WidenParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t first = int64_t{blockIdx.x} * kRowsOfBlock;
    for_rows_of_warp(first, min(first + kRowsOfBlock, params.count), [&](int64_t number) {
        const VectorTable vector = params.vectors.from(number);
        float* const to = params.to + number * params.head_size;
#pragma unroll 1
        for (int channel = lane_index(); channel < params.head_size; channel += kWarpSize) {
            to[channel] = vector.format == VectorFormat::kExact ? to_float(static_cast<const T*>(vector.codes)[channel])
                                                                : read_channel(vector, channel);
        }
    });
}

}  // namespace kvc
