// Lengths of the rows of a batch, which come from the device: a length out of range counts as the nearest one in range.
#pragma once

#include <cstdint>

#include "kernels/platform.cuh"

namespace kvc {

// n of a row: the caller's length, within the prompt.
__device__ __forceinline__ int32_t clamped_length(const int64_t* lengths, int64_t row, int64_t longest) {
    const int64_t n = lengths[row];
    return static_cast<int32_t>(n < 0 ? 0 : n > longest ? longest : n);
}

// V of a row: the number of queries of its window that vote, the last ones; all W where the caller gives no list.
__device__ __forceinline__ int32_t window_length(const int64_t* lengths, int64_t row, int32_t window) {
    return lengths == nullptr ? window : max(clamped_length(lengths, row, window), 1);
}

}  // namespace kvc
