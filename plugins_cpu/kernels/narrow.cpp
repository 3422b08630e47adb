// Products of a few tokens with a float matrix. Each row of the matrix is read once for all tokens, so that together
// they take the time of one token: the time to read the matrix.
#include "kernels/narrow.h"

#include "kernels/vector.h"

namespace kvc::KVC_TARGET {
namespace {

/// Rows of the matrix, and tokens, that are multiplied at once: as many as there are registers for their sums.
constexpr int kMatrixRows = kWidth == 16 ? 4 : 2;
constexpr int kTokens = 5;

template <int Rows, int Tokens>
inline void multiply_block(const NarrowCall& call, int64_t row, int64_t token) {
    const float* const matrix = call.matrix + row * call.in;
    const float* const x = call.x + token * call.in;
    Vector sums[Rows][Tokens] = {};
    const auto add = [&](int64_t first, auto part) {
        Vector factors[Rows];
        for (int i = 0; i < Rows; ++i) factors[i] = part(matrix + i * call.in + first);
        for (int t = 0; t < Tokens; ++t) {
            const Vector values = part(x + t * call.in + first);
            for (int i = 0; i < Rows; ++i) sums[i][t] += factors[i] * values;
        }
    };
    int64_t first = 0;
    for (; first + kWidth <= call.in; first += kWidth) {
        // The next rows begin elsewhere, so the processor's own prefetcher does not fetch them.
        for (int i = 0; i < Rows; ++i) prefetch(matrix + (Rows + i) * call.in + first, kWidth);
        add(first, [](const float* source) { return load(source); });
    }
    const int64_t left = call.in - first;
    if (left > 0) add(first, [left](const float* source) { return load_first(source, left); });
    for (int t = 0; t < Tokens; ++t) {
        for (int i = 0; i < Rows; ++i) call.y[(token + t) * call.out + row + i] = sum_of_elements(sums[i][t]);
    }
}

/// Multiplies the last `left` <= `Tokens` tokens.
template <int Rows, int Tokens>
inline void multiply_last(const NarrowCall& call, int64_t row, int64_t token, int64_t left) {
    if constexpr (Tokens > 0) {
        if (left == Tokens) {
            multiply_block<Rows, Tokens>(call, row, token);
        } else {
            multiply_last<Rows, Tokens - 1>(call, row, token, left);
        }
    }
}

template <int Rows>
inline void multiply_tokens(const NarrowCall& call, int64_t row) {
    int64_t token = 0;
    for (; token + kTokens <= call.tokens; token += kTokens) multiply_block<Rows, kTokens>(call, row, token);
    multiply_last<Rows, kTokens - 1>(call, row, token, call.tokens - token);
}

}  // namespace

void multiply_narrow(const NarrowCall& call, int64_t first_row, int64_t last_row) {
    int64_t row = first_row;
    for (; row + kMatrixRows <= last_row; row += kMatrixRows) multiply_tokens<kMatrixRows>(call, row);
    for (; row < last_row; ++row) multiply_tokens<1>(call, row);
}

}  // namespace kvc::KVC_TARGET
