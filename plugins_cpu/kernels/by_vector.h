// Products of a few tokens with quantised rows: each row is read once, a vector of neighbouring elements at a time.
#pragma once

#include "kernels/columns.h"
#include "kernels/quantised_target.h"

namespace kvc::KVC_TARGET {
namespace {  // nothing here may be merged with code of another instruction set

/// Least distance in bytes from a read to its prefetch: processors do not prefetch past a page by themselves.
constexpr int64_t kAhead = 8192;
/// Bytes that one prefetch fetches.
constexpr int kLine = 64;
/// True if the lanes of a block's sums are added before they are scaled: a token's results are then those by panel, to
/// the bit. Otherwise lanes are scaled one by one, and are added at the end of a row.
constexpr bool kSumsWholeBlocks = kWidth == 8;
/// Rows that are read at once.
constexpr int kRowsAtOnce = kSumsWholeBlocks ? kWidth : 4;

/// The rounded elements of a few tokens, from some block on.
struct TokenPart {
    const int8_t* levels;
    const float* scales;
    const int32_t* sums;
    int64_t padded;       ///< blocks of a token
    const uint8_t* next;  ///< packed elements to prefetch: rows follow each other in memory, so they are one stream
};

/// The scale of each lane's block, for vector `index`, from the `kWidth` scales in `scales`.
template <int Bits, int Index, int... Lanes>
inline Vector spread(Vector scales, Numbers<Lanes...>) {
    return __builtin_shufflevector(scales, scales, ((Index * kWidth + Lanes) / Bits)...);
}

/// Adds the products of vector `Index` of `kWidth` blocks, and of the vectors after it.
template <int Bits, int Index = 0>
inline void add_vectors(const uint8_t* const* packed, const Vector* scales, const TokenPart& token, Vector* sums) {
    if constexpr (Index < Bits) {
        const Integers start = load_integers(token.sums + Index * kWidth);
#pragma GCC unroll 4
        for (int row = 0; row < kRowsAtOnce; ++row) {
            __builtin_prefetch(token.next + (Index * kRowsAtOnce + row) * kBytes);
            const Bytes bytes = load_bytes(packed[row] + Index * kBytes);
            Integers product;
            if constexpr (Bits == 4) {
                const Bytes low = bytes & 15, high = bytes >> 4;
                product = dot<4>(start, low, load_bytes(token.levels + 2 * Index * kBytes));
                product = dot<4>(product, high, load_bytes(token.levels + (2 * Index + 1) * kBytes));
            } else {
                product = dot<8>(start, bytes, load_bytes(token.levels + Index * kBytes));
            }
            sums[row] += __builtin_convertvector(product, Vector) *
                         spread<Bits, Index>(scales[row], typename Counted<kWidth>::Type{});
        }
        add_vectors<Bits, Index + 1>(packed, scales, token, sums);
    }
}

/// Multiplies one token with up to `kRowsAtOnce` rows from `first` on, where lanes are scaled one by one.
template <int Bits>
void multiply_rows(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t token, int64_t first,
                   int64_t count, float* y) {
    const int64_t padded = padded_blocks(input.blocks), blocks = matrix.blocks, whole = blocks / kWidth * kWidth;
    const int64_t together = kRowsAtOnce * blocks * 4 * Bits;
    TokenPart part{input.levels + token * padded * kBlock, input.scales + token * padded,
                   input.sums + token * padded * kSumsOfBlock, padded,
                   matrix.packed + first * blocks * 4 * Bits + (together > kAhead ? together : kAhead)};
    const uint8_t* packed[kRowsAtOnce];
    int64_t rows[kRowsAtOnce];
    Vector sums[kRowsAtOnce] = {}, scales[kRowsAtOnce];
    for (int row = 0; row < kRowsAtOnce; ++row) {
        rows[row] = (first + (row < count ? row : 0)) * blocks;
        packed[row] = matrix.packed + rows[row] * 4 * Bits;
    }
    int64_t block = 0;
    for (; block < whole; block += kWidth) {
        const Vector inputs = load(part.scales);
#pragma GCC unroll 4
        for (int row = 0; row < kRowsAtOnce; ++row) {
            scales[row] = load_half(matrix.scales + rows[row] + block) * inputs;
        }
        add_vectors<Bits>(packed, scales, part, sums);
        part.levels += kWidth * kBlock;
        part.scales += kWidth;
        part.sums += kWidth * Bits;
        part.next += kRowsAtOnce * Bits * kBytes;
        for (int row = 0; row < kRowsAtOnce; ++row) packed[row] += Bits * kBytes;
    }
    if (block < blocks) {
        const int64_t rest = blocks - block;
        alignas(64) uint8_t copies[kRowsAtOnce][Bits * kBytes] = {};
        const Vector inputs = load(part.scales);
        for (int row = 0; row < kRowsAtOnce; ++row) {
            std::memcpy(copies[row], packed[row], static_cast<size_t>(rest) * 4 * Bits);
            packed[row] = copies[row];
            scales[row] = load_half_first(matrix.scales + rows[row] + block, rest) * inputs;
        }
        add_vectors<Bits>(packed, scales, part, sums);
    }
    for (int row = 0; row < count; ++row) y[row] = sum_of_elements(sums[row]);
}

/// The sums of each quarter of four vectors, side by side in the quarter's place.
inline Integers sums_of_four_lanes(Integers one, Integers other, Integers third, Integers fourth) {
    const typename Counted<kWidth>::Type lanes{};
    const Integers front = alternated<1, false>(one, other, lanes) + alternated<1, true>(one, other, lanes);
    const Integers back = alternated<1, false>(third, fourth, lanes) + alternated<1, true>(third, fourth, lanes);
    return alternated<2, false>(front, back, lanes) + alternated<2, true>(front, back, lanes);
}

/// The lower or upper halves of two vectors.
template <bool Upper, int... Lanes>
inline Integers halves_of(Integers one, Integers other, Numbers<Lanes...>) {
    constexpr int half = kWidth / 2;
    return __builtin_shufflevector(one, other, (Lanes % half + (Upper ? half : 0) + Lanes / half * kWidth)...);
}

/// The products of one vector of a row and a token, of which each lane has a part.
template <int Bits>
inline Integers products_of_vector(Bytes bytes, const int8_t* levels) {
    if constexpr (Bits == 8) return dot<8>(Integers{}, bytes, load_bytes(levels));
    const Pairs pairs =
        products_in_pairs(bytes & 15, load_bytes(levels)) + products_in_pairs(bytes >> 4, load_bytes(levels + kBytes));
    return sums_of_pairs(pairs, Pairs{} + 1);
}

/// Adds the products of `kWidth` blocks of `kRowsAtOnce` rows, whose scales are scales[block][row].
template <int Bits, int Tokens>
inline void add_blocks(const uint8_t* const* packed, const float (*scales)[kWidth], const TokenPart& part,
                       Vector* sums) {
    constexpr int blocks_of_vector = 8 / Bits;
    const typename Counted<kWidth>::Type lanes{};
#pragma GCC unroll 2
    for (int index = 0; index < Bits; ++index) {
        Integers parts[Tokens][kRowsAtOnce];
#pragma GCC unroll 8
        for (int row = 0; row < kRowsAtOnce; ++row) {
            const int ahead = (index * kRowsAtOnce + row) * kBytes;
            if (row % (kLine / kBytes) == 0) __builtin_prefetch(part.next + ahead);
            const Bytes bytes = load_bytes(packed[row] + index * kBytes);
#pragma GCC unroll 2
            for (int t = 0; t < Tokens; ++t) {
                const int8_t* const levels = part.levels + t * part.padded * kBlock + index * kBytes * blocks_of_vector;
                parts[t][row] = products_of_vector<Bits>(bytes, levels);
            }
        }
#pragma GCC unroll 2
        for (int t = 0; t < Tokens; ++t) {
            const Integers front = sums_of_four_lanes(parts[t][0], parts[t][1], parts[t][2], parts[t][3]);
            const Integers back = sums_of_four_lanes(parts[t][4], parts[t][5], parts[t][6], parts[t][7]);
            const Integers lower = halves_of<false>(front, back, lanes), upper = halves_of<true>(front, back, lanes);
            const int block = index * blocks_of_vector;
            const float* const of_token = part.scales + t * part.padded + block;
            if constexpr (blocks_of_vector == 1) {
                add_block(sums[t], lower + upper, load(scales[block]), of_token[0]);
            } else {
                const int32_t* const start = part.sums + t * part.padded * kSumsOfBlock + block;
                add_block(sums[t], lower + start[0], load(scales[block]), of_token[0]);
                add_block(sums[t], upper + start[1], load(scales[block + 1]), of_token[1]);
            }
        }
    }
}

/// Multiplies `Tokens` tokens from `token` on with up to `kRowsAtOnce` rows from `first` on, where `kSumsWholeBlocks`.
template <int Bits, int Tokens>
void multiply_group(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t token, int64_t first,
                    int64_t count, float* y, int64_t stride) {
    const int64_t padded = padded_blocks(input.blocks), blocks = matrix.blocks;
    const int64_t together = kRowsAtOnce * blocks * 4 * Bits;
    TokenPart part{input.levels + token * padded * kBlock, input.scales + token * padded,
                   input.sums + token * padded * kSumsOfBlock, padded,
                   matrix.packed + first * blocks * 4 * Bits + (together > kAhead ? together : kAhead)};
    const uint8_t* packed[kRowsAtOnce];
    const uint16_t* halves[kRowsAtOnce];
    for (int row = 0; row < kRowsAtOnce; ++row) {
        const int64_t place = (first + (row < count ? row : 0)) * blocks;
        packed[row] = matrix.packed + place * 4 * Bits;
        halves[row] = matrix.scales + place;
    }
    Vector sums[Tokens] = {};
    alignas(64) uint8_t copies[kRowsAtOnce][Bits * kBytes];
    for (int64_t block = 0; block < blocks; block += kWidth) {
        const int64_t some = blocks - block < kWidth ? blocks - block : kWidth;
        alignas(64) float scales[kWidth][kWidth];
        if (some < kWidth) {
            std::memset(copies, 0, sizeof copies);
            std::memset(scales, 0, sizeof scales);
            for (int row = 0; row < kRowsAtOnce; ++row) {
                std::memcpy(copies[row], packed[row], static_cast<size_t>(some) * 4 * Bits);
                packed[row] = copies[row];
            }
        }
        half_columns(halves, block, some, scales[0], kWidth);
        add_blocks<Bits, Tokens>(packed, scales, part, sums);
        part.levels += kWidth * kBlock;
        part.scales += kWidth;
        part.sums += kWidth;
        part.next += kRowsAtOnce * Bits * kBytes;
        for (int row = 0; row < kRowsAtOnce; ++row) packed[row] += Bits * kBytes;
    }
    for (int t = 0; t < Tokens; ++t) {
        if (count == kRowsAtOnce) {
            store(y + t * stride, sums[t]);
        } else {
            store_first(y + t * stride, sums[t], count);
        }
    }
}

}  // namespace
}  // namespace kvc::KVC_TARGET
