// The columns of `kWidth` rows: numbers that are neighbours in a row come to lie in vectors of their own.
#pragma once

#include "kernels/bytes.h"

namespace kvc::KVC_TARGET {
namespace {  // nothing here may be merged with code of another instruction set

/// Alternate lanes of two vectors within quarters of 16 bytes, `Size` lanes of each at a time, from the lower half of the
/// quarters or from the upper one.
template <int Size, bool Upper, int... Lanes>
inline Integers alternated(Integers one, Integers other, Numbers<Lanes...>) {
    return __builtin_shufflevector(one, other,
                                   (Lanes / 4 * 4 + Lanes % 4 / (2 * Size) * Size + Lanes % Size + (Upper ? 2 : 0) +
                                    Lanes / Size % 2 * kWidth)...);
}

/// The 16 bytes at row(0), at row(4), and so on.
template <typename Source>
inline Integers every_fourth_row(const Source& row) {
    typedef int32_t Four __attribute__((vector_size(16)));
    typedef int32_t Eight __attribute__((vector_size(32)));
    const auto four = [&](int64_t index) {
        Four made;
        std::memcpy(&made, row(index), sizeof made);
        return made;
    };
    if constexpr (kWidth == 4) {
        return four(0);
    } else {
        const auto eight = [&](int64_t index) -> Eight {
            return __builtin_shufflevector(four(index), four(index + 4), 0, 1, 2, 3, 4, 5, 6, 7);
        };
        if constexpr (kWidth == 8) {
            return eight(0);
        } else {
            return __builtin_shufflevector(eight(0), eight(8), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        }
    }
}

/// Within every quarter of 16 bytes, word j of rows[i] becomes word i of columns[j].
inline void columns_of_quarters(const Integers* rows, Integers* columns) {
    const typename Counted<kWidth>::Type lanes{};
    const Integers lower_front = alternated<1, false>(rows[0], rows[1], lanes);
    const Integers upper_front = alternated<1, true>(rows[0], rows[1], lanes);
    const Integers lower_back = alternated<1, false>(rows[2], rows[3], lanes);
    const Integers upper_back = alternated<1, true>(rows[2], rows[3], lanes);
    columns[0] = alternated<2, false>(lower_front, lower_back, lanes);
    columns[1] = alternated<2, true>(lower_front, lower_back, lanes);
    columns[2] = alternated<2, false>(upper_front, upper_back, lanes);
    columns[3] = alternated<2, true>(upper_front, upper_back, lanes);
}

/// Four neighbouring words of each of `kWidth` rows, from `offset` bytes on: word i of all rows becomes columns[i].
inline void four_columns(const uint8_t* const* rows, int64_t offset, Integers* columns) {
    Integers quarters[4];
    for (int i = 0; i < 4; ++i) {
        quarters[i] = every_fourth_row([&](int64_t row) { return rows[i + row] + offset; });
    }
    columns_of_quarters(quarters, columns);
}

/// Widens `count` <= `kWidth` float16 numbers of each of `kWidth` rows, from `start` on: number i of all rows goes to
/// columns + i * stride.
inline void half_columns(const uint16_t* const* rows, int64_t start, int64_t count, float* columns, int64_t stride) {
    alignas(64) float wide[kWidth][kWidth];
    const uint8_t* bytes[kWidth];
    for (int row = 0; row < kWidth; ++row) {
        const uint16_t* const source = rows[row] + start;
        store(wide[row], count == kWidth ? load_half(source) : load_half_first(source, count));
        bytes[row] = reinterpret_cast<const uint8_t*>(wide[row]);
    }
    for (int first = 0; first < count; first += 4) {
        Integers four[4];
        four_columns(bytes, first * 4, four);
        for (int i = 0; i < 4 && first + i < count; ++i) {
            store(columns + (first + i) * stride, reinterpret_cast<Vector>(four[i]));
        }
    }
}

}  // namespace
}  // namespace kvc::KVC_TARGET
