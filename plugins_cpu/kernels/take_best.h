#pragma once

#include "kernels/kernels.h"

namespace kvc::KVC_TARGET {

void take_best(const RankedItems& items, int64_t wanted, int32_t* parts);

/// The rank of a score: equal scores have equal ranks, NaN and negative ones -1, zero and above the bits of the float,
/// which grow with it.
static inline int32_t rank_of(float score) {
    int32_t bits;
    __builtin_memcpy(&bits, &score, sizeof bits);
    return score >= 0.0f ? bits & 0x7fffffff : -1;
}

}  // namespace kvc::KVC_TARGET
