// Memory for tokens that are rounded to 8 bits, and the order of their elements.
#pragma once

#include <cstdint>

#include "kernels/choice.h"
#include "kernels/quantised.h"
#include "operators/scratch.h"

namespace kvc {

/// Tokens up to which products by vector are faster than by panel; results are the same.
inline constexpr int64_t kFewTokens = 2;

inline Order order_of(int64_t tokens) { return tokens <= kFewTokens ? Order::kByVector : Order::kByPanel; }

/// Some tokens in 8 bits, followed by the remainders of that rounding, in 8 bits too: a wide input has both.
struct RoundedParts {
    RoundedInput levels, rest, both;
};

/// Memory for rounded tokens of `blocks` blocks each.
class Rounded {
public:
    Rounded(int64_t tokens, int64_t blocks) : blocks_(blocks), padded_(padded_blocks(blocks)) {
        const int64_t all = tokens * padded_;
        memory_ = aligned(all * (kQuantisedBlock + int64_t{sizeof(float)} + int64_t{sizeof(int32_t)}));
        levels_ = reinterpret_cast<int8_t*>(memory_.get());
        scales_ = reinterpret_cast<float*>(memory_.get() + all * kQuantisedBlock);
        sums_ = reinterpret_cast<int32_t*>(scales_ + all);
    }

    /// The memory of `tokens` tokens from `first` on.
    RoundedInput of(int64_t first, int64_t tokens, Order order) const {
        const int64_t start = first * padded_;
        return {.levels = levels_ + start * kQuantisedBlock,
                .scales = scales_ + start,
                .sums = sums_ + start,
                .tokens = tokens,
                .blocks = blocks_,
                .order = order};
    }

    /// The memory of the wide input of `tokens` tokens, which takes the place of twice as many from `first` on.
    RoundedParts wide(int64_t first, int64_t tokens, Order order) const {
        return {of(first, tokens, order), of(first + tokens, tokens, order), of(first, 2 * tokens, order)};
    }

private:
    int64_t blocks_, padded_;
    Scratch memory_;
    int8_t* levels_;
    float* scales_;
    int32_t* sums_;
};

/// Rounds tokens first..last-1 of x [tokens, 32 * blocks] twice.
inline void round_wide(const Kernels& set, const float* x, int bits, int64_t first, int64_t last,
                       const RoundedParts& parts) {
    const int64_t width = parts.levels.blocks * kQuantisedBlock;
    const Scratch scratch = aligned((last - first) * width * int64_t{sizeof(float)});
    float* const left = reinterpret_cast<float*>(scratch.get()) - first * width;
    set.round_input(x, bits, first, last, parts.levels, left);
    set.round_input(left, bits, first, last, parts.rest, nullptr);
}

/// Multiplies rows first..last-1 of a matrix with a wide input: y [tokens, matrix.rows].
inline void multiply_wide(const Kernels& set, const QuantisedMatrix& matrix, const RoundedParts& parts, int64_t first,
                          int64_t last, float* y) {
    const int64_t tokens = parts.levels.tokens, rows = last - first;
    const Scratch memory = aligned(2 * tokens * rows * int64_t{sizeof(float)});
    float* const coarse = reinterpret_cast<float*>(memory.get());
    const float* const fine = coarse + tokens * rows;
    set.multiply(matrix, parts.both, first, last, coarse - first, rows);
    for (int64_t token = 0; token < tokens; ++token) {
        float* const sums = y + token * matrix.rows + first;
        for (int64_t row = 0; row < rows; ++row) sums[row] = coarse[token * rows + row] + fine[token * rows + row];
    }
}

}  // namespace kvc
