// Small matrix products in registers.
#pragma once

#include "kernels/steps.h"

namespace kvc::KVC_TARGET {

/// Vectors per row of the result, and rows, that are summed at once: as many as there are registers for.
inline constexpr int kParts = kWidth == 16 ? 4 : 2;
inline constexpr int kRows = 6;

/// sums[Rows, Parts vectors] = a[Rows, depth] b[depth, Parts vectors], added to the result's old value if `Add`.
template <int Rows, int Parts, bool Add, class Step>
static inline void multiply_block(const Step* a, int64_t a_width, const Step* b, int64_t b_width, int64_t depth,
                                  float* result, int64_t width) {
    Vector sums[Rows][Parts];
    for (int row = 0; row < Rows; ++row) {
        for (int part = 0; part < Parts; ++part) {
            sums[row][part] = Add ? load(result + row * width + part * kWidth) : Vector{};
        }
    }
    for (int64_t step = 0; step < depth; ++step) {
        Vector parts[Parts];
        for (int part = 0; part < Parts; ++part) parts[part] = load_steps(b + step * b_width + part * kWidth);
#pragma GCC unroll 6
        for (int row = 0; row < Rows; ++row) {
            const Step factor = a[row * a_width + step];
#pragma GCC unroll 4
            for (int part = 0; part < Parts; ++part)
                sums[row][part] = add_product(sums[row][part], parts[part], factor);
        }
    }
    for (int row = 0; row < Rows; ++row) {
        for (int part = 0; part < Parts; ++part) store(result + row * width + part * kWidth, sums[row][part]);
    }
}

template <int Rows, bool Add, class Step>
static inline void multiply_rows(const Step* a, int64_t a_width, const Step* b, int64_t b_width, int64_t depth,
                                 int64_t columns, float* result, int64_t width) {
    int64_t column = 0;
    for (; column + kParts * kWidth <= columns; column += kParts * kWidth) {
        multiply_block<Rows, kParts, Add>(a, a_width, b + column, b_width, depth, result + column, width);
    }
    for (; column < columns; column += kWidth) {
        multiply_block<Rows, 1, Add>(a, a_width, b + column, b_width, depth, result + column, width);
    }
}

/// Multiplies the last `left` <= `Rows` rows.
template <int Rows, bool Add, class Step>
static inline void multiply_last_rows(int64_t left, const Step* a, int64_t a_width, const Step* b, int64_t b_width,
                                      int64_t depth, int64_t columns, float* result, int64_t width) {
    if constexpr (Rows > 0) {
        if (left == Rows) {
            multiply_rows<Rows, Add>(a, a_width, b, b_width, depth, columns, result, width);
        } else {
            multiply_last_rows<Rows - 1, Add>(left, a, a_width, b, b_width, depth, columns, result, width);
        }
    }
}

/// result[rows, columns] = a[rows, depth] b[depth, columns], added to the old one if `Add`; `columns` in whole vectors,
/// `depth` in steps. The sums of a row do not depend on the rows beside it.
template <bool Add, class Step>
static inline void multiply(const Step* a, int64_t a_width, const Step* b, int64_t b_width, int64_t rows, int64_t depth,
                            int64_t columns, float* result, int64_t width) {
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
        multiply_rows<kRows, Add>(a + row * a_width, a_width, b, b_width, depth, columns, result + row * width, width);
    }
    multiply_last_rows<kRows - 1, Add>(rows - row, a + row * a_width, a_width, b, b_width, depth, columns,
                                       result + row * width, width);
}

}  // namespace kvc::KVC_TARGET
