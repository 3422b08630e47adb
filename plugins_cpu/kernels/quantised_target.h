#pragma once

#include "kernels/quantised.h"
#include "kernels/vector.h"

namespace kvc::KVC_TARGET {

/// Columns that share a scale, for sizes of arrays.
inline constexpr int kBlock = static_cast<int>(kQuantisedBlock);
/// Tokens up to which `multiply` by vector is faster than by panel, as measured on AVX2 and, while rows of panels were
/// moved one number at a time, on AVX-512.
inline constexpr int64_t kFewTokens = kWidth == 8 ? 2 : 8;

/// Adds the products of one block, each lane those of a row. By vector and by panel, sums are rounded here alone, and so
/// in the same way.
static inline void add_block(Vector& sum, Integers products, Vector row_scales, float scale) {
    sum += __builtin_convertvector(products, Vector) * (row_scales * scale);
}

RoundInput round_input;
Multiply multiply;

}  // namespace kvc::KVC_TARGET
