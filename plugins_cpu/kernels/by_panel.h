// Products of many tokens with quantised rows: a panel of rows is unpacked, and a vector holds the same elements of
// neighbouring rows.
#pragma once

#include <type_traits>

#include "kernels/columns.h"
#include "kernels/quantised_target.h"

namespace kvc::KVC_TARGET {

inline constexpr int kPanelVectors = 2;
inline constexpr int kPanelRows = kPanelVectors * kWidth;
static_assert(kPanelRows <= kWidestPanel);
/// Tokens whose sums stay in registers while a panel is read.
inline constexpr int kTileTokens = kWidth == 16 ? 6 : kWidth == 8 ? 4 : 2;
/// Steps of a panel's block without a jump: with eight of them, GCC runs out of 16 registers.
inline constexpr int kStepsAtOnce = kWidth == 16 ? 8 : 2;

/// A panel: the levels of all its rows for each block and group of four elements, and the rows' scales for each block.
struct Panel {
    uint8_t* levels;  ///< [blocks][8][kPanelVectors] vectors
    float* scales;    ///< [blocks][kPanelRows]
};

/// Unpacks the levels of one vector's rows.
template <int Bits>
void unpack_levels(const uint8_t* const* packed, int64_t blocks, uint8_t* levels) {
    constexpr int steps = kBlock / 4;  // of four elements
    for (int64_t block = 0; block < blocks; ++block) {
        for (int first = 0; first < Bits; first += 4) {  // a packed block has `Bits` words
            Integers columns[4];
            four_columns(packed, (block * Bits + first) * 4, columns);
            for (int word = 0; word < 4; ++word) {
                const Bytes bytes = reinterpret_cast<Bytes>(columns[word]);
                const Bytes unpacked[2] = {Bits == 4 ? bytes & 15 : bytes, bytes >> 4};
                for (int part = 0; part < 8 / Bits; ++part) {
                    const int64_t step = block * steps + (first + word) * (8 / Bits) + part;
                    std::memcpy(levels + step * kPanelVectors * kBytes, &unpacked[part], kBytes);
                }
            }
        }
    }
}

/// Unpacks rows first..first+count-1; what the panel's other rows hold is not read.
template <int Bits>
void unpack_panel(const QuantisedMatrix& matrix, int64_t first, int64_t count, const Panel& panel) {
    const int64_t blocks = matrix.blocks;
    for (int vector = 0; vector < kPanelVectors; ++vector) {
        const uint8_t* packed[kWidth];
        const uint16_t* halves[kWidth];
        for (int lane = 0; lane < kWidth; ++lane) {
            const int64_t row = vector * kWidth + lane, place = (first + (row < count ? row : 0)) * blocks;
            packed[lane] = matrix.packed + place * 4 * Bits;
            halves[lane] = matrix.scales + place;
        }
        unpack_levels<Bits>(packed, blocks, panel.levels + vector * kBytes);
        float* const scales = panel.scales + vector * kWidth;
        for (int64_t block = 0; block < blocks; block += kWidth) {
            const int64_t some = blocks - block < kWidth ? blocks - block : kWidth;
            half_columns(halves, block, some, scales + block * kPanelRows, kPanelRows);
        }
    }
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

/// Multiplies `Tokens` tokens from `token` on with a panel's rows.
template <int Bits, int Tokens>
void multiply_tile(const Panel& panel, const RoundedInput& input, int64_t token, int64_t count, float* y,
                   int64_t stride) {
    constexpr int steps = kBlock / 4;
    const int64_t padded = padded_blocks(input.blocks);
    const int8_t* const inputs = input.levels + token * padded * kBlock;
    const float* const scales = input.scales + token * padded;
    const int32_t* const corrections = input.sums + token * padded * kSumsOfBlock;
    Vector sums[Tokens][kPanelVectors] = {};
    for (int64_t block = 0; block < input.blocks; ++block) {
        BlockSum<Bits> products[Tokens][kPanelVectors];
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) {
            const BlockSum<Bits> start(corrections[t * padded * kSumsOfBlock + block]);
#pragma GCC unroll 2
            for (int vector = 0; vector < kPanelVectors; ++vector) products[t][vector] = start;
        }
        const uint8_t* const levels = panel.levels + block * steps * kPanelVectors * kBytes;
#pragma GCC unroll kStepsAtOnce
        for (int step = 0; step < steps; ++step) {
            Bytes rows[kPanelVectors];
#pragma GCC unroll 2
            for (int vector = 0; vector < kPanelVectors; ++vector) {
                rows[vector] = load_bytes(levels + (step * kPanelVectors + vector) * kBytes);
            }
#pragma GCC unroll 8
            for (int t = 0; t < Tokens; ++t) {
                const Bytes four = all_bytes(inputs + (t * padded + block) * kBlock + 4 * step);
#pragma GCC unroll 2
                for (int vector = 0; vector < kPanelVectors; ++vector) {
                    products[t][vector].add(rows[vector], four);
                }
            }
        }
#pragma GCC unroll 2
        for (int vector = 0; vector < kPanelVectors; ++vector) {
            const int64_t place = block * kPanelRows + vector * kWidth;
            const Vector row_scales = load(panel.scales + place);
#pragma GCC unroll 8
            for (int t = 0; t < Tokens; ++t) {
                add_block(sums[t][vector], products[t][vector].total(), row_scales, scales[t * padded + block]);
            }
        }
    }
    for (int t = 0; t < Tokens; ++t) {
        float* const place = y + (token + t) * stride;
        if (count == kPanelRows) {
            for (int vector = 0; vector < kPanelVectors; ++vector) store(place + vector * kWidth, sums[t][vector]);
        } else {
            std::memcpy(place, sums[t], static_cast<size_t>(count) * sizeof(float));
        }
    }
}

/// Multiplies the last `left` <= `Tokens` tokens with a panel's rows.
template <int Bits, int Tokens = kTileTokens - 1>
void multiply_rest(const Panel& panel, const RoundedInput& input, int64_t left, int64_t count, float* y,
                   int64_t stride) {
    if constexpr (Tokens > 0) {
        if (left == Tokens) {
            multiply_tile<Bits, Tokens>(panel, input, input.tokens - left, count, y, stride);
        } else {
            multiply_rest<Bits, Tokens - 1>(panel, input, left, count, y, stride);
        }
    }
}

/// Multiplies all tokens with a panel of `count` rows from `row` on.
template <int Bits>
void multiply_panel(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t row, int64_t count, float* y,
                    int64_t stride, uint8_t* scratch) {
    const Panel panel{scratch, reinterpret_cast<float*>(scratch + matrix.blocks * kBlock * kPanelRows)};
    unpack_panel<Bits>(matrix, row, count, panel);
    int64_t token = 0;
    for (; token + kTileTokens <= input.tokens; token += kTileTokens) {
        multiply_tile<Bits, kTileTokens>(panel, input, token, count, y + row, stride);
    }
    multiply_rest<Bits>(panel, input, input.tokens - token, count, y + row, stride);
}

}  // namespace kvc::KVC_TARGET
