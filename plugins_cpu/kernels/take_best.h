#pragma once

#include "kernels/kernels.h"
#include "kernels/vector.h"

namespace kvc::KVC_TARGET {

void take_best(const RankedItems& items, int64_t wanted, int32_t* parts);

/// The rank of a score: equal scores have equal ranks, NaN and negative ones -1, zero and above the bits of the float,
/// which grow with it.
static inline int32_t rank_of(float score) {
    int32_t bits;
    __builtin_memcpy(&bits, &score, sizeof bits);
    return score >= 0.0f ? bits & 0x7fffffff : -1;
}

/// Stores the first `count` ranks.
static inline void store_ranks(int32_t* target, Integers ranks, int64_t count) {
    if (count == kWidth) {
        __builtin_memcpy(target, &ranks, sizeof ranks);
    } else {
        __builtin_memcpy(target, &ranks, static_cast<size_t>(count) * sizeof *target);
    }
}

static inline Integers ranks_of(Vector scores) {
    return scores >= Vector{} ? reinterpret_cast<Integers>(scores) & 0x7fffffff : Integers{} - 1;
}

}  // namespace kvc::KVC_TARGET
