// Products with matrices in 4 or 8 bits, whose input is rounded to 8 bits with a scale per 32 elements. What rounding
// leaves can be rounded as another token: the sum of both products is that of an input in 15 bits or more.
//
// A matrix stays in the layout of the weight file (kvc_trt/operators/quantised_linear.py) and is never copied whole.
// For few tokens, each row is read once; a vector holds neighbouring elements of one row. For many tokens, a panel of
// rows is unpacked; a vector holds the same elements of neighbouring rows and serves all tokens.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvc {

/// Columns that share a scale.
inline constexpr int64_t kQuantisedBlock = 32;

/// A matrix [rows, 32 * blocks]: element i of a block is (level_i - 2^(bits - 1)) * scale.
struct QuantisedMatrix {
    const uint8_t* packed;   ///< [rows, blocks, 4 * bits]; in 4 bits, element 2j is the low nibble of byte j
    const uint16_t* scales;  ///< float16 [rows, blocks]
    int64_t rows;
    int64_t blocks;
    int bits;  ///< 4 or 8
};

/// The order of a token's rounded elements.
enum class Order : uint8_t {
    kByVector,  ///< for few tokens
    kByPanel,   ///< for many tokens
};

/// Tokens rounded to 8 bits, with room for padded = padded_blocks(blocks) blocks per token.
struct RoundedInput {
    int8_t* levels;  ///< [tokens, 32 * padded]
    float* scales;   ///< [tokens, padded]
    int32_t* sums;   ///< [tokens, padded], -2^(bits - 1) times the sum of a block's levels, or two halves of it
    int64_t tokens;
    int64_t blocks;
    Order order;
};

/// Blocks per token in memory: whole vectors of the widest instruction set.
static constexpr int64_t padded_blocks(int64_t blocks) { return (blocks + 15) / 16 * 16; }

/// Rows that one call of `multiply` by panel unpacks at once: the widest panel of any instruction set.
inline constexpr int64_t kWidestPanel = 32;

/// Rounds tokens first..last-1 of x [tokens, 32 * blocks]. `left`, of the same shape, receives the remainders beyond
/// the levels; null if they are not needed.
using RoundInput = void(const float* x, int bits, int64_t first, int64_t last, const RoundedInput& result, float* left);

/// Writes columns first..last-1 of y [tokens, stride]: the products with rows first..last-1 of the matrix.
using Multiply = void(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t first, int64_t last, float* y,
                      int64_t stride);

}  // namespace kvc
