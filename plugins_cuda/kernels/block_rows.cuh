// The place of a turn's tokens in the rows of its block: shared by the kernels that store them.
#pragma once

#include <cstdint>

#include "kernels/platform.cuh"

namespace kvc {

// The entries that a row stores before the block, and the row's own tokens in the block.
struct BlockRow {
    int64_t stored;  // entries before the block, 0..C
    int64_t count;   // new tokens, 0..M
};

__device__ __forceinline__ int64_t clamped(int64_t value, int64_t most) {
    return value < 0 ? 0 : value > most ? most : value;
}

// Numbers of a row that are out of range count as the nearest values in range.
__device__ __forceinline__ BlockRow block_row(const int64_t* cache_lengths, const int64_t* lengths, int64_t row,
                                              int64_t capacity, int64_t block) {
    return {clamped(cache_lengths[row], capacity), clamped(lengths[row], block)};
}

}  // namespace kvc
