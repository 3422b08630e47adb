// The entries of its cache that a row reads in a decode step: for selection, which fills the list, and for attention.
//
// They depend on the row's own length and the engine's constants alone, so a row does the same work in any batch.
#pragma once

#include "kernels/platform.cuh"

namespace kvc {

// Constants of an engine that decide how many entries of its cache a row reads.
struct AttentionLimits {
    int64_t capacity;     // C
    int64_t top_k;        // tokens that a sparse step reads
    int64_t dense_limit;  // rows of at most this many entries read all of them: max(token_budget, dense_until)
    int32_t recent;       // last entries that a sparse row reads in any case, of its top_k
};

// The entries that one row reads.
struct AttendedRow {
    int length;  // m: entries after the append; 0 if the row is inactive
    int count;   // k_eff: entries that are read
    bool all;    // count == length: slots 0..m-1, no list is needed

    // In a row that does not read all: the entries that are compared, which are the first ones, and those of them that
    // are read. `recent` stays where the kernel's parameters are, for it would take a register from the start to the end.
    __device__ __forceinline__ int compared(const AttentionLimits& limits) const { return length - limits.recent; }
    __device__ __forceinline__ int best(const AttentionLimits& limits) const { return count - limits.recent; }
};

// True if a row of this many entries takes part in the step: there is a slot for its new token.
__device__ __forceinline__ bool has_slot(int64_t cache_length, int64_t capacity) {
    return cache_length >= 0 && cache_length < capacity;
}

// The row whose cache holds `cache_length` entries before the append.
__device__ __forceinline__ AttendedRow attended_row(int64_t cache_length, const AttentionLimits& limits) {
    if (!has_slot(cache_length, limits.capacity)) {
        return {0, 0, true};
    }
    const int64_t length = cache_length + 1;
    const bool all = length <= limits.dense_limit || length <= limits.top_k;
    return {static_cast<int>(length), static_cast<int>(all ? length : limits.top_k), all};
}

}  // namespace kvc
