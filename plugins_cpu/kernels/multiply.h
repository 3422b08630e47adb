// Small matrix products in registers.
#pragma once

#include "kernels/vector.h"

namespace kvc::KVC_TARGET {

/// Vectors of a row of the result that are summed at a time: with four rows, as many as there are registers for.
inline constexpr int kParts = kWidth == 16 ? 4 : 2;

/// sums[Rows, Parts vectors] = a[Rows, depth] b[depth, Parts vectors], added to what the result holds if `Add`.
template <int Rows, int Parts, bool Add>
static inline void multiply_block(const float* a, int64_t a_width, const float* b, int64_t b_width, int64_t depth,
                                  float* result, int64_t width) {
    Vector sums[Rows][Parts];
    for (int row = 0; row < Rows; ++row) {
        for (int part = 0; part < Parts; ++part) {
            sums[row][part] = Add ? load(result + row * width + part * kWidth) : Vector{};
        }
    }
    for (int64_t step = 0; step < depth; ++step) {
        Vector parts[Parts];
        for (int part = 0; part < Parts; ++part) parts[part] = load(b + step * b_width + part * kWidth);
        for (int row = 0; row < Rows; ++row) {
            const float factor = a[row * a_width + step];
            for (int part = 0; part < Parts; ++part) sums[row][part] += parts[part] * factor;
        }
    }
    for (int row = 0; row < Rows; ++row) {
        for (int part = 0; part < Parts; ++part) store(result + row * width + part * kWidth, sums[row][part]);
    }
}

template <int Rows, bool Add>
static inline void multiply_rows(const float* a, int64_t a_width, const float* b, int64_t b_width, int64_t depth,
                                 int64_t columns, float* result, int64_t width) {
    int64_t column = 0;
    for (; column + kParts * kWidth <= columns; column += kParts * kWidth) {
        multiply_block<Rows, kParts, Add>(a, a_width, b + column, b_width, depth, result + column, width);
    }
    for (; column < columns; column += kWidth) {
        multiply_block<Rows, 1, Add>(a, a_width, b + column, b_width, depth, result + column, width);
    }
}

/// result[rows, columns] = a[rows, depth] b[depth, columns], added to what it holds if `Add`; `columns` in whole vectors.
template <bool Add>
static inline void multiply(const float* a, int64_t a_width, const float* b, int64_t b_width, int64_t rows,
                            int64_t depth, int64_t columns, float* result, int64_t width) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
        multiply_rows<4, Add>(a + row * a_width, a_width, b, b_width, depth, columns, result + row * width, width);
    }
    for (; row < rows; ++row) {
        multiply_rows<1, Add>(a + row * a_width, a_width, b, b_width, depth, columns, result + row * width, width);
    }
}

}  // namespace kvc::KVC_TARGET
