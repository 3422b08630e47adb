// Products of a few tokens with quantised rows: each row is read once, a vector of neighbouring elements at a time.
//
// The lanes of a block's sums are added before they are scaled, as a panel does: a token's results are those by panel, to
// the bit.
#pragma once

#include "kernels/columns.h"
#include "kernels/quantised_target.h"

namespace kvc::KVC_TARGET {
namespace {  // nothing here may be merged with code of another instruction set

/// Least distance in bytes from a read to its prefetch: processors do not prefetch past a page by themselves.
constexpr int64_t kAhead = 8192;
/// Rows that are read at once. Each is a stream of memory of its own, and a processor follows only a few.
constexpr int kRowsAtOnce = kWidth == 8 ? 8 : 4;
/// Tokens that are multiplied with a row while it is in a register.
constexpr int kTokensAtOnce = 2;
/// Quarters of 64 bytes, of 16 bytes each, in a vector: all lanes of one come from one block.
constexpr int kQuarters = kWidth / 4;

/// A number of every row that is read.
typedef float OfRows __attribute__((vector_size(4 * kRowsAtOnce)));
typedef int32_t IntegersOfRows __attribute__((vector_size(4 * kRowsAtOnce)));

/// Whole blocks that are read at once, and the vectors that they take: blocks that fill a vector, or a block of two.
template <int Bits>
constexpr int kUnitBlocks = kWidth > Bits ? kWidth / Bits : 1;
template <int Bits>
constexpr int kUnitVectors = kUnitBlocks<Bits> * Bits / kWidth;

/// The rounded elements of a few tokens, from some block on.
struct TokenPart {
    const int8_t* levels;
    const float* scales;
    const int32_t* sums;
    int64_t padded;       ///< blocks of a token
    const uint8_t* next;  ///< packed elements to prefetch: rows follow each other in memory, so they are one stream
};

/// The sums of each quarter of four vectors, side by side in the quarter's place.
inline Integers sums_of_four_lanes(const Integers* vectors) {
    const typename Counted<kWidth>::Type lanes{};
    const Integers front =
        alternated<1, false>(vectors[0], vectors[1], lanes) + alternated<1, true>(vectors[0], vectors[1], lanes);
    const Integers back =
        alternated<1, false>(vectors[2], vectors[3], lanes) + alternated<1, true>(vectors[2], vectors[3], lanes);
    return alternated<2, false>(front, back, lanes) + alternated<2, true>(front, back, lanes);
}

/// Quarter `Quarter` of a vector for every four rows, side by side.
template <int Quarter, int... Lanes>
inline IntegersOfRows quarter_of(const Integers* fours, Numbers<Lanes...>) {
    static_assert(kRowsAtOnce <= 8);
    return __builtin_shufflevector(fours[0], fours[kRowsAtOnce / 4 - 1],
                                   (Lanes / 4 * kWidth + 4 * Quarter + Lanes % 4)...);
}

/// The sums of block `Block` of a unit.
template <int Bits, int Block>
inline IntegersOfRows sums_of_block(const Integers* fours) {
    constexpr int quarters = kQuarters / kUnitBlocks<Bits>;
    const typename Counted<kRowsAtOnce>::Type lanes{};
    const IntegersOfRows sums = quarter_of<quarters * Block>(fours, lanes);
    if constexpr (quarters == 1) {
        return sums;
    } else {
        static_assert(quarters == 2);
        return sums + quarter_of<quarters * Block + 1>(fours, lanes);
    }
}

/// Adds the blocks of a unit to the sums of a token, one after the other.
template <int Bits, int... Blocks>
inline void add_blocks(OfRows& sums, const Integers* fours, const OfRows* scales, const float* scales_of_token,
                       const int32_t* starts, Numbers<Blocks...>) {
    const auto add = [&](IntegersOfRows products, int block) {
        if constexpr (!kCentres<Bits>) products += starts[block];
        add_block(sums, products, scales[block], scales_of_token[block]);
    };
    (add(sums_of_block<Bits, Blocks>(fours), Blocks), ...);
}

/// Adds the products of one vector of a row and a token, each lane those of four elements, or of four even and four odd.
template <int Bits>
inline Integers add_products(Integers sum, Bytes bytes, const int8_t* levels) {
    if constexpr (Bits == 8) {
        return dot<8>(sum, bytes, load_bytes(levels));
    } else if constexpr (kInPairs<Bits>) {
        const Pairs pairs = products_in_pairs(bytes & 15, load_bytes(levels)) +
                            products_in_pairs(bytes >> 4, load_bytes(levels + kBytes));
        return sum + sums_of_pairs(pairs, Pairs{} + 1);
    } else {
        return dot<Bits>(dot<Bits>(sum, bytes & 15, load_bytes(levels)), bytes >> 4, load_bytes(levels + kBytes));
    }
}

/// Adds the products of one unit of blocks, `offset` bytes from `packed` on, whose scales begin at `scales`.
template <int Bits, int Tokens>
inline void add_unit(const uint8_t* const* packed, int64_t offset, const OfRows* scales, const TokenPart& part,
                     OfRows* sums) {
    constexpr int bytes_of_levels = kBytes * 8 / Bits, fours = kRowsAtOnce / 4;
    Integers quarters[Tokens][fours];
#pragma GCC unroll 2
    for (int four = 0; four < fours; ++four) {
        Integers products[Tokens][4] = {};
#pragma GCC unroll 4
        for (int row = 0; row < 4; ++row) {
#pragma GCC unroll 2
            for (int vector = 0; vector < kUnitVectors<Bits>; ++vector) {
                const Bytes bytes = load_bytes(packed[4 * four + row] + offset + vector * kBytes);
#pragma GCC unroll 2
                for (int t = 0; t < Tokens; ++t) {
                    const int8_t* const levels = part.levels + t * part.padded * kBlock + vector * bytes_of_levels;
                    products[t][row] = add_products<Bits>(products[t][row], bytes, levels);
                }
            }
        }
#pragma GCC unroll 2
        for (int t = 0; t < Tokens; ++t) quarters[t][four] = sums_of_four_lanes(products[t]);
    }
#pragma GCC unroll 2
    for (int t = 0; t < Tokens; ++t) {
        add_blocks<Bits>(sums[t], quarters[t], scales, part.scales + t * part.padded, part.sums + t * part.padded,
                         typename Counted<kUnitBlocks<Bits>>::Type{});
    }
}

/// The scales of `count` <= `kWidth` blocks from `start` on, a vector for each block; others are zeros.
inline void scales_of_blocks(const uint16_t* const* halves, int64_t start, int64_t count, OfRows* scales) {
    for (int four = 0; four < kRowsAtOnce; four += 4) {
        Integers rows[4], columns[4];
        for (int row = 0; row < 4; ++row) {
            const uint16_t* const source = halves[four + row] + start;
            rows[row] =
                reinterpret_cast<Integers>(count == kWidth ? load_half(source) : load_half_first(source, count));
        }
        columns_of_quarters(rows, columns);
        for (int quarter = 0; quarter < kQuarters; ++quarter) {
            for (int i = 0; i < 4; ++i) {
                std::memcpy(reinterpret_cast<float*>(&scales[4 * quarter + i]) + four,
                            reinterpret_cast<const float*>(&columns[i]) + 4 * quarter, 4 * sizeof(float));
            }
        }
    }
}

/// Multiplies `Tokens` tokens from `token` on with up to `kRowsAtOnce` rows from `first` on.
template <int Bits, int Tokens>
void multiply_group(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t token, int64_t first,
                    int64_t count, float* y, int64_t stride) {
    constexpr int unit = kUnitBlocks<Bits>, bytes_of_unit = kUnitVectors<Bits> * kBytes;
    const int64_t padded = padded_blocks(input.blocks), blocks = matrix.blocks;
    const int64_t together = kRowsAtOnce * blocks * 4 * Bits;
    TokenPart part{input.levels + token * padded * kBlock, input.scales + token * padded, input.sums + token * padded,
                   padded, matrix.packed + first * blocks * 4 * Bits + (together > kAhead ? together : kAhead)};
    const uint8_t* packed[kRowsAtOnce];
    const uint16_t* halves[kRowsAtOnce];
    for (int row = 0; row < kRowsAtOnce; ++row) {
        const int64_t place = (first + (row < count ? row : 0)) * blocks;
        packed[row] = matrix.packed + place * 4 * Bits;
        halves[row] = matrix.scales + place;
    }
    OfRows sums[Tokens] = {};
    alignas(64) uint8_t copies[kRowsAtOnce][Bits * kBytes];
    for (int64_t block = 0; block < blocks; block += kWidth) {
        const int64_t some = blocks - block < kWidth ? blocks - block : kWidth;
        OfRows scales[kWidth];
        if (some < kWidth) {
            std::memset(copies, 0, sizeof copies);
            for (int row = 0; row < kRowsAtOnce; ++row) {
                std::memcpy(copies[row], packed[row], static_cast<size_t>(some) * 4 * Bits);
                packed[row] = copies[row];
            }
        }
        scales_of_blocks(halves, block, some, scales);
        for (int index = 0; index < kWidth / unit; ++index) {
            for (int line = 0; line < kRowsAtOnce * bytes_of_unit; line += kLine) {
                __builtin_prefetch(part.next + line);
            }
            add_unit<Bits, Tokens>(packed, index * bytes_of_unit, scales + index * unit, part, sums);
            part.levels += unit * kBlock;
            part.scales += unit;
            part.sums += unit;
            part.next += kRowsAtOnce * bytes_of_unit;
        }
        for (int row = 0; row < kRowsAtOnce; ++row) packed[row] += Bits * kBytes;
    }
    for (int t = 0; t < Tokens; ++t) std::memcpy(y + t * stride, &sums[t], static_cast<size_t>(count) * sizeof(float));
}

}  // namespace
}  // namespace kvc::KVC_TARGET
