#pragma once

#include "kernels/quantised.h"
#include "kernels/vector.h"

namespace kvc::KVC_TARGET {

/// Columns that share a scale, for sizes of arrays.
inline constexpr int kBlock = static_cast<int>(kQuantisedBlock);
/// Bytes that one prefetch fetches.
inline constexpr int kLine = 64;

/// Adds the products of one block, each lane those of a row. By vector and by panel, sums are rounded here alone, and so
/// in the same way.
template <class Sum, class Products>
static inline void add_block(Sum& sum, Products products, Sum row_scales, float scale) {
    sum += __builtin_convertvector(products, Sum) * (row_scales * scale);
}

RoundInput round_input;
Multiply multiply;

}  // namespace kvc::KVC_TARGET
