// Products of many tokens with quantised rows: a panel of rows is unpacked, and a vector holds the same elements of
// neighbouring rows.
#pragma once

#include <type_traits>

#include "kernels/columns.h"
#include "kernels/quantised_target.h"

namespace kvc::KVC_TARGET {
namespace {  // nothing here may be merged with code of another instruction set

/// Vectors of a panel's rows. While a panel of few tokens waits for memory it is narrow, so that the next is soon needed.
constexpr int kWideVectors = 2, kNarrowVectors = kWidth == 16 ? 1 : kWideVectors;
static_assert(kWideVectors * kWidth <= kWidestPanel);
/// Tokens up to which a panel is narrow.
constexpr int kNarrowTokens = 16;
/// Tokens whose sums stay in registers while a panel is read.
template <int Vectors>
constexpr int kTileTokens = kWidth == 16  ? (Vectors == 1 ? 8 : 6)
                            : kWidth == 8 ? 4
                                          : 2;
/// Steps of a panel's block without a jump: with eight of them, GCC runs out of 16 registers.
constexpr int kStepsAtOnce = kWidth == 16 ? 8 : 2;

/// Blocks of a panel that are unpacked at once, at most. Among many tokens it pays to read long parts of each.
constexpr int kPanelBlocks = 96;
/// Blocks that stay in the first-level cache, and the tokens up to which that pays.
constexpr int kNearBlocks = 32, kNearTokens = 64;

/// A part of a panel: the levels of all its rows for each block and group of four elements, and the rows' scales.
template <int Vectors>
struct Panel {
    alignas(64) uint8_t levels[kPanelBlocks][kBlock / 4][Vectors][kBytes];
    alignas(64) float scales[kPanelBlocks][Vectors * kWidth];
};

/// Unpacks `blocks` blocks of the levels of a vector's rows.
template <int Bits, int Vectors>
void unpack_levels(const uint8_t* const* packed, int64_t blocks, int vector, Panel<Vectors>& panel) {
    for (int64_t block = 0; block < blocks; ++block) {
        for (int first = 0; first < Bits; first += 4) {  // a packed block has `Bits` words
            Integers columns[4];
            four_columns(packed, (block * Bits + first) * 4, columns);
            for (int word = 0; word < 4; ++word) {
                const Bytes bytes = reinterpret_cast<Bytes>(columns[word]);
                const Bytes unpacked[2] = {Bits == 4 ? bytes & 15 : bytes, bytes >> 4};
                for (int part = 0; part < 8 / Bits; ++part) {
                    const int step = (first + word) * (8 / Bits) + part;
                    std::memcpy(panel.levels[block][step][vector], &unpacked[part], kBytes);
                }
            }
        }
    }
}

/// The part of a panel that is multiplied, and the place of its products.
struct PanelPart {
    int64_t first_row;
    int64_t rows;  ///< of the panel that are rows of the matrix
    int64_t first_block;
    int64_t blocks;
    float* y;
    int64_t stride;
};

/// Unpacks a part of a panel; rows that the matrix does not have repeat one that it has.
template <int Bits, int Vectors>
void unpack_panel(const QuantisedMatrix& matrix, const PanelPart& part, Panel<Vectors>& panel) {
    for (int vector = 0; vector < Vectors; ++vector) {
        const uint8_t* packed[kWidth];
        const uint16_t* halves[kWidth];
        for (int lane = 0; lane < kWidth; ++lane) {
            const int64_t row = vector * kWidth + lane;
            const int64_t place = (part.first_row + (row < part.rows ? row : 0)) * matrix.blocks + part.first_block;
            packed[lane] = matrix.packed + place * 4 * Bits;
            halves[lane] = matrix.scales + place;
        }
        unpack_levels<Bits>(packed, part.blocks, vector, panel);
        for (int64_t block = 0; block < part.blocks; block += kWidth) {
            const int64_t left = part.blocks - block;
            half_columns(halves, block, left < kWidth ? left : kWidth, panel.scales[block] + vector * kWidth,
                         Vectors * kWidth);
        }
    }
}

/// Prefetches as much of the next panel as it has in a block; its rows follow each other in memory.
template <int Bits, int Vectors>
KVC_PREFETCHES inline void prefetch_next(const QuantisedMatrix& matrix, const PanelPart& part, int64_t block) {
    constexpr int rows = Vectors * kWidth, bytes = rows * 4 * Bits;
    const int64_t place = (part.first_row + rows) * matrix.blocks + (part.first_block + block) * rows;
    for (int offset = 0; offset < bytes; offset += kLine) {
        __builtin_prefetch(matrix.packed + place * 4 * Bits + offset);
    }
    __builtin_prefetch(matrix.scales + place);
}

/// The products of one block, summed in the lanes of a panel's rows: four elements of every row at a time.
template <int Bits>
class BlockSum {
public:
    BlockSum() = default;

    explicit BlockSum(int32_t start) : sum_(kCentres<Bits> ? Sum{} : reinterpret_cast<Sum>(all_integers(start))) {}

    void add(Bytes levels, Bytes input) {
        if constexpr (kInPairs<Bits>) {
            sum_ += products_in_pairs(levels, input);
        } else {
            sum_ = dot<Bits>(sum_, levels, input);
        }
    }

    Integers total() const {
        if constexpr (kInPairs<Bits>) {
            return sums_of_pairs(sum_, Pairs{} + 1);
        } else {
            return sum_;
        }
    }

private:
    using Sum = std::conditional_t<kInPairs<Bits>, Pairs, Integers>;
    Sum sum_;
};

/// Adds the products of `Tokens` tokens from `token` on with a part of a panel; the first part begins with zeros.
template <int Bits, int Vectors, int Tokens>
void multiply_tile(const QuantisedMatrix& matrix, const Panel<Vectors>& panel, const RoundedInput& input,
                   const PanelPart& part, int64_t token) {
    constexpr int steps = kBlock / 4, rows_of_panel = Vectors * kWidth;
    const int64_t padded = padded_blocks(input.blocks), start_of_part = token * padded + part.first_block;
    const int8_t* const inputs = input.levels + start_of_part * kBlock;
    const float* const scales = input.scales + start_of_part;
    const int32_t* const corrections = input.sums + token * padded + part.first_block;
    float* const y = part.y + token * part.stride;
    const size_t bytes = static_cast<size_t>(part.rows) * sizeof(float);
    Vector sums[Tokens][Vectors] = {};
    if (part.first_block > 0) {
        for (int t = 0; t < Tokens; ++t) {
            if (part.rows == rows_of_panel) {
                std::memcpy(sums[t], y + t * part.stride, sizeof sums[t]);
            } else {
                std::memcpy(sums[t], y + t * part.stride, bytes);
            }
        }
    }
    for (int64_t block = 0; block < part.blocks; ++block) {
        if (token == 0) prefetch_next<Bits, Vectors>(matrix, part, block);
        BlockSum<Bits> products[Tokens][Vectors];
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) {
            const BlockSum<Bits> start(corrections[t * padded + block]);
#pragma GCC unroll 2
            for (int vector = 0; vector < Vectors; ++vector) products[t][vector] = start;
        }
#pragma GCC unroll kStepsAtOnce
        for (int step = 0; step < steps; ++step) {
            Bytes rows[Vectors];
#pragma GCC unroll 2
            for (int vector = 0; vector < Vectors; ++vector) {
                rows[vector] = load_bytes(panel.levels[block][step][vector]);
            }
#pragma GCC unroll 8
            for (int t = 0; t < Tokens; ++t) {
                const Bytes four = all_bytes(inputs + (t * padded + block) * kBlock + 4 * step);
#pragma GCC unroll 2
                for (int vector = 0; vector < Vectors; ++vector) {
                    products[t][vector].add(rows[vector], four);
                }
            }
        }
#pragma GCC unroll 2
        for (int vector = 0; vector < Vectors; ++vector) {
            const Vector row_scales = load(panel.scales[block] + vector * kWidth);
#pragma GCC unroll 8
            for (int t = 0; t < Tokens; ++t) {
                add_block(sums[t][vector], products[t][vector].total(), row_scales, scales[t * padded + block]);
            }
        }
    }
    for (int t = 0; t < Tokens; ++t) {
        if (part.rows == rows_of_panel) {  // a copy of a known size takes an instruction or two
            std::memcpy(y + t * part.stride, sums[t], sizeof sums[t]);
        } else {
            std::memcpy(y + t * part.stride, sums[t], bytes);
        }
    }
}

/// Multiplies the last `left` <= `Tokens` tokens with a part of a panel.
template <int Bits, int Vectors, int Tokens = kTileTokens<Vectors> - 1>
void multiply_rest(const QuantisedMatrix& matrix, const Panel<Vectors>& panel, const RoundedInput& input,
                   const PanelPart& part, int64_t left) {
    if constexpr (Tokens > 0) {
        if (left == Tokens) {
            multiply_tile<Bits, Vectors, Tokens>(matrix, panel, input, part, input.tokens - left);
        } else {
            multiply_rest<Bits, Vectors, Tokens - 1>(matrix, panel, input, part, left);
        }
    }
}

/// Multiplies all tokens with the `count` rows from `row` on, at most as many as a panel has.
template <int Bits, int Vectors>
void multiply_panel(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t row, int64_t count, float* y,
                    int64_t stride) {
    constexpr int tile = kTileTokens<Vectors>;
    Panel<Vectors> panel;
    const int64_t at_once = input.tokens > kNearTokens ? kPanelBlocks : kNearBlocks;
    for (int64_t block = 0; block < matrix.blocks; block += at_once) {
        const int64_t left = matrix.blocks - block;
        const PanelPart part{.first_row = row,
                             .rows = count,
                             .first_block = block,
                             .blocks = left < at_once ? left : at_once,
                             .y = y + row,
                             .stride = stride};
        unpack_panel<Bits>(matrix, part, panel);
        int64_t token = 0;
        for (; token + tile <= input.tokens; token += tile) {
            multiply_tile<Bits, Vectors, tile>(matrix, panel, input, part, token);
        }
        multiply_rest<Bits>(matrix, panel, input, part, input.tokens - token);
    }
}

}  // namespace
}  // namespace kvc::KVC_TARGET
