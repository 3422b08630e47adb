// Products with matrices in 4 or 8 bits, whose input is rounded to 8 bits with a scale per 32 elements.
//
// A matrix lies as the weight file has it (kvc_trt/operators/quantised_linear.py) and is never copied as a whole. Few
// tokens: each row is read once, a vector holding neighbouring elements of one row. Many tokens: a panel of rows is
// unpacked so that a vector holds one element group of neighbouring rows, and serves all tokens.
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

/// How the rounded elements of a token are ordered.
enum class Order : uint8_t {
    kByVector,  ///< for few tokens
    kByPanel,   ///< for many
};

/// Sums of levels that are kept per block at most: one for each lane that multiplies a part of it.
inline constexpr int64_t kSumsOfBlock = 8;

/// Tokens rounded to 8 bits, with room for padded = padded_blocks(blocks) blocks per token.
struct RoundedInput {
    int8_t* levels;  ///< [tokens, 32 * padded]
    float* scales;   ///< [tokens, padded]
    int32_t* sums;   ///< [tokens, 8 * padded], -2^(bits - 1) times the sum of the levels, of each lane or of a block
    int64_t tokens;
    int64_t blocks;
    Order order;
};

/// Blocks per token in memory: whole vectors of the widest instruction set.
static constexpr int64_t padded_blocks(int64_t blocks) { return (blocks + 15) / 16 * 16; }

/// Rows that one call of `multiply` by panel unpacks at once, for any instruction set: the widest panel.
inline constexpr int64_t kWidestPanel = 32;

/// Bytes that `multiply` by panel needs for a panel, aligned to 64.
static constexpr int64_t panel_scratch(int64_t blocks) { return kWidestPanel * blocks * (kQuantisedBlock + 4); }

/// Rounds tokens first..last-1 of x [tokens, 32 * blocks].
using RoundInput = void(const float* x, int bits, int64_t first, int64_t last, const RoundedInput& result);

/// Writes columns first..last-1 of y [tokens, stride]: the products with these rows of the matrix.
using Multiply = void(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t first, int64_t last, float* y,
                      int64_t stride, uint8_t* scratch);

}  // namespace kvc
