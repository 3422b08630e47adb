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

// What a row keeps: `most`, or where rows have budgets of their own, the row's, no less than its window.
__device__ __forceinline__ int64_t row_budget(const int64_t* budgets, int64_t row, int64_t most, int32_t window) {
    if (budgets == nullptr) return most;
    const int64_t own = budgets[row] > window ? budgets[row] : window;
    return own < most ? own : most;
}

// The width by which a row's votes are pooled: `widest`, or where rows have widths of their own, the row's.
__device__ __forceinline__ int32_t row_pool_kernel(const int64_t* widths, int64_t row, int32_t widest) {
    return widths == nullptr ? widest : max(clamped_length(widths, row, widest), 1);
}

}  // namespace kvc
