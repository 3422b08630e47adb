// Vectors of a cache, in any format, widened to floats in registers.
//
// kInt8 and kFp8 have one scale for a vector: it multiplies sums of products of codes, not each channel. kInt4 has a
// scale and a minimum for a group of channels, and is widened to the values themselves.
#pragma once

#include "kernels/bytes.h"
#include "kernels/stored.h"

namespace kvc::KVC_TARGET {

/// Vectors of floats that one load widens: kInt4 gives the even channels of a stretch, then the odd ones.
template <VectorFormat Format>
inline constexpr int kVectors = Format == VectorFormat::kInt4 ? 2 : 1;

/// True if sums over channels are to be multiplied by the vector's scale.
template <VectorFormat Format>
inline constexpr bool kScalesSums = Format == VectorFormat::kInt8 || Format == VectorFormat::kFp8;

/// What codes that are loaded have to be multiplied by beside the scale.
template <VectorFormat Format>
inline constexpr float kCodeUnit = 1.0f;
#if defined(__F16C__)
/// E4M3 is read as the float16 with the same fields, whose exponents are 8 less.
template <>
inline constexpr float kCodeUnit<VectorFormat::kFp8> = 256.0f;
#endif

/// Where the channels of one vector are.
struct Row {
    const uint8_t* codes;
    const float* scales;  ///< one for each group in kInt4
    const float* minima;  ///< likewise
    int64_t groups;
};

typedef uint8_t Codes __attribute__((vector_size(KVC_WIDTH)));
typedef int8_t SignedCodes __attribute__((vector_size(KVC_WIDTH)));

static inline Codes load_codes(const uint8_t* source) {
    Codes made;
    std::memcpy(&made, source, sizeof made);
    return made;
}

static inline Codes load_first_codes(const uint8_t* source, int64_t count) {
    Codes made{};
    std::memcpy(&made, source, static_cast<size_t>(count));
    return made;
}

// The compiler takes codes apart one by one where its own conversions widen them, so these are written by hand.
#if defined(__AVX2__)
static inline __m128i in_register(Codes codes) {
#if defined(__AVX512F__)
    return reinterpret_cast<__m128i>(codes);
#else
    int64_t eight;
    std::memcpy(&eight, &codes, sizeof eight);
    return _mm_cvtsi64_si128(eight);
#endif
}
#endif

/// Whole numbers -128..127.
static inline Integers integers_of_int8(Codes codes) {
#if defined(__AVX512F__)
    return reinterpret_cast<Integers>(_mm512_maskz_cvtepi8_epi32(-1, in_register(codes)));
#elif defined(__AVX2__)
    return reinterpret_cast<Integers>(_mm256_cvtepi8_epi32(in_register(codes)));
#else
    return __builtin_convertvector(reinterpret_cast<SignedCodes>(codes), Integers);
#endif
}

/// Whole numbers 0..255.
static inline Integers integers_of_uint8(Codes codes) {
#if defined(__AVX512F__)
    return reinterpret_cast<Integers>(_mm512_maskz_cvtepu8_epi32(-1, in_register(codes)));
#elif defined(__AVX2__)
    return reinterpret_cast<Integers>(_mm256_cvtepu8_epi32(in_register(codes)));
#else
    return __builtin_convertvector(codes, Integers);
#endif
}

/// Sixteen bits of each code; the upper half has the code's sign.
static inline Halves halves_of_int8(Codes codes) {
#if defined(__AVX512F__)
    return reinterpret_cast<Halves>(_mm256_cvtepi8_epi16(in_register(codes)));
#elif defined(__AVX2__)
    return reinterpret_cast<Halves>(_mm_cvtepi8_epi16(in_register(codes)));
#else
    return __builtin_convertvector(reinterpret_cast<SignedCodes>(codes), Halves);
#endif
}

/// E4M3 numbers divided by kCodeUnit; NaN does not occur.
static inline Vector widened_e4m3(Codes codes) {
#if defined(__F16C__)
    return widened((halves_of_int8(codes) << 7) & 0xbf80);  // without the sign's copy in bit 14
#else
    // The exponent is moved by a product, which also makes denormal numbers normal.
    const Integers extended = integers_of_int8(codes);
    const Vector moved = reinterpret_cast<Vector>((extended & 0x7f) << 20) * 0x1p120f;
    return reinterpret_cast<Vector>(reinterpret_cast<Integers>(moved) | (extended & INT32_MIN));
#endif
}

/// E5M2 numbers, the upper halves of float16 numbers.
static inline Vector widened_e5m2(Codes codes) { return widened(halves_of_int8(codes) << 8); }

/// Widens the kVectors codes of the channels from `channel` on; `codes` are theirs.
template <VectorFormat Format>
static inline void widen_codes(const Row& row, int64_t channel, Codes codes, Vector* made) {
    if constexpr (Format == VectorFormat::kInt8) made[0] = __builtin_convertvector(integers_of_int8(codes), Vector);
    if constexpr (Format == VectorFormat::kFp8) made[0] = widened_e4m3(codes);
    if constexpr (Format == VectorFormat::kInt4) {
        const int64_t group = row.groups == 1 ? 0 : channel / kGroup;
        const Integers bytes = integers_of_uint8(codes);
#if defined(__AVX512F__)
        // A table of the values of all codes, of which the lowest four bits of each lane choose one.
        const Vector levels = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512 table = reinterpret_cast<__m512>(levels * row.scales[group] + row.minima[group]);
        made[0] = reinterpret_cast<Vector>(_mm512_maskz_permutexvar_ps(-1, reinterpret_cast<__m512i>(bytes), table));
        made[1] =
            reinterpret_cast<Vector>(_mm512_maskz_permutexvar_ps(-1, reinterpret_cast<__m512i>(bytes >> 4), table));
#else
        const float scale = row.scales[group], minimum = row.minima[group];
        made[0] = __builtin_convertvector(bytes & 15, Vector) * scale + minimum;
        made[1] = __builtin_convertvector(bytes >> 4, Vector) * scale + minimum;
#endif
    }
}

/// Loads kVectors * kWidth channels from `channel` on.
template <VectorFormat Format>
static inline void load_channels(const Row& row, int64_t channel, Vector* made) {
    if constexpr (Format == VectorFormat::kExact) {
        made[0] = load(reinterpret_cast<const float*>(row.codes) + channel);
    } else {
        widen_codes<Format>(row, channel, load_codes(row.codes + channel / kVectors<Format>), made);
    }
}

/// Loads the last `left` channels of a vector; the lanes after them hold numbers, or NaN if the vector does.
template <VectorFormat Format>
static inline void load_last_channels(const Row& row, int64_t channel, int64_t left, Vector* made) {
    if constexpr (Format == VectorFormat::kExact) {
        made[0] = load_first(reinterpret_cast<const float*>(row.codes) + channel, left);
    } else {
        const uint8_t* const codes = row.codes + channel / kVectors<Format>;
        widen_codes<Format>(row, channel, load_first_codes(codes, left / kVectors<Format>), made);
    }
}

/// The place, among floats in the order in which a format loads them, of a channel.
template <VectorFormat Format>
static constexpr int64_t place_of_channel(int64_t channel) {
    if constexpr (Format != VectorFormat::kInt4) return channel;
    constexpr int64_t stretch = 2 * kWidth;
    return channel / stretch * stretch + channel % 2 * kWidth + channel % stretch / 2;
}

/// `head_size` rounded up to the channels that one load widens.
template <VectorFormat Format>
static constexpr int64_t loaded_width(int64_t head_size) {
    constexpr int64_t stretch = kVectors<Format> * kWidth;
    return (head_size + stretch - 1) / stretch * stretch;
}

/// 2 to the power of bytes less 127; NaN for 255.
static inline Vector powers_of_bytes(Codes bytes) {
    const Integers exponents = integers_of_uint8(bytes), bits = exponents << 23;
    const Integers denormal = exponents == 0 ? all_integers(0x00400000) : bits;
    return reinterpret_cast<Vector>(exponents == 255 ? all_integers(0x7fc00000) : denormal);
}

/// Widens the exponents of `count` tokens: of the listed ones, or of the first ones.
static inline void widen_exponents(const uint8_t* source, const int32_t* tokens, int64_t count, float* target) {
    for (int64_t first = 0; first < count; first += kWidth) {
        const int64_t here = count - first < kWidth ? count - first : kWidth;
        Codes bytes{};
        if (tokens == nullptr) {
            bytes = here == kWidth ? load_codes(source + first) : load_first_codes(source + first, here);
        } else {
            for (int64_t number = 0; number < here; ++number) bytes[number] = source[tokens[first + number]];
        }
        if (here == kWidth) {
            store(target + first, powers_of_bytes(bytes));
        } else {
            store_first(target + first, powers_of_bytes(bytes), here);
        }
    }
}

#if defined(__F16C__)
/// Widens `Count` <= 4 float16 numbers of each listed token. They go through a general register: a vector that is loaded
/// from where a part of it was just stored waits for the store.
template <int Count>
static inline void widen_listed(const uint8_t* source, const int32_t* tokens, int64_t count, float* target) {
    static_assert(Count <= 4);
    for (int64_t number = 0; number < count; ++number) {
        int64_t halves = 0;
        std::memcpy(&halves, source + tokens[number] * int64_t{2 * Count}, 2 * Count);
        const __m128 made = _mm_cvtph_ps(_mm_cvtsi64_si128(halves));
        std::memcpy(target + number * Count, &made, Count * sizeof(float));
    }
}
#endif

/// Widens `width` float16 numbers of each of `count` tokens: of the listed ones, or of the first ones.
static inline void widen_halves(const uint8_t* source, const int32_t* tokens, int64_t count, int64_t width,
                                float* target) {
    const auto widen = [](const uint8_t* from, int64_t numbers, float* to) {
        int64_t place = 0;
        for (; place + kWidth <= numbers; place += kWidth) {
            Halves halves;
            std::memcpy(&halves, from + place * 2, sizeof halves);
            store(to + place, widened(halves));
        }
        if (place == numbers) return;
        Halves halves{};
        std::memcpy(&halves, from + place * 2, static_cast<size_t>(numbers - place) * 2);
        store_first(to + place, widened(halves), numbers - place);
    };
    if (tokens == nullptr) return widen(source, count * width, target);
#if defined(__F16C__)
    if (width == 2) return widen_listed<2>(source, tokens, count, target);
    if (width == 4) return widen_listed<4>(source, tokens, count, target);
#endif
    if (width > 1) {
        for (int64_t number = 0; number < count; ++number) {
            widen(source + tokens[number] * width * 2, width, target + number * width);
        }
        return;
    }
    for (int64_t first = 0; first < count; first += kWidth) {
        Halves halves{};
        const int64_t here = count - first < kWidth ? count - first : kWidth;
        for (int64_t number = 0; number < here; ++number) {
            uint16_t half;
            std::memcpy(&half, source + tokens[first + number] * int64_t{2}, sizeof half);
            halves[number] = half;
        }
        store_first(target + first, widened(halves), here);
    }
}

/// Vectors of some tokens, with their scales and minima widened beforehand.
struct Table {
    Vectors vectors;
    const int32_t* tokens;  ///< the tokens, by number; null for the first ones
    const float* scales;    ///< [count, groups]; null in kExact
    const float* minima;    ///< [count, groups] in kInt4
    int64_t groups, stride;
    int64_t ahead;  ///< tokens from one that is read in order to the one that is prefetched
};

/// Bytes of codes from a vector that is read in order to the one that is prefetched: the processor's own prefetcher stops
/// at the end of a page, and begins late in the next.
inline constexpr int64_t kAhead = 8192;

/// A table of codes alone.
static inline Table table_of_codes(const Vectors& vectors, const int32_t* tokens) {
    const int64_t stride = bytes_of_codes(vectors.format, vectors.head_size);
    return {.vectors = vectors,
            .tokens = tokens,
            .scales = nullptr,
            .minima = nullptr,
            .groups = 0,
            .stride = stride,
            .ahead = kAhead / stride};
}

/// Opens a table of `count` tokens; `scratch` has room for numbers_scratch(count, head_size) floats.
template <VectorFormat Format>
static inline Table open_table(const Vectors& vectors, const int32_t* tokens, int64_t count, float* scratch) {
    const int64_t groups = groups_of(Format, vectors.head_size);
    float* const minima = scratch + count * groups;
    if constexpr (Format == VectorFormat::kFp8) {
        widen_exponents(vectors.scales, tokens, count, scratch);
    }
    if constexpr (Format == VectorFormat::kInt8 || Format == VectorFormat::kInt4) {
        widen_halves(vectors.scales, tokens, count, groups, scratch);
    }
    if constexpr (Format == VectorFormat::kInt4) widen_halves(vectors.minima, tokens, count, groups, minima);
    Table made = table_of_codes(vectors, tokens);
    made.scales = scratch;
    made.minima = minima;
    made.groups = groups;
    return made;
}

static inline Row row_of(const Table& table, int64_t number) {
    const int64_t token = table.tokens == nullptr ? number : table.tokens[number];
    return {table.vectors.codes + token * table.stride, table.scales + number * table.groups,
            table.minima + number * table.groups, table.groups};
}

/// Prefetches `bytes` from `address` on; addresses outside of any memory do no harm.
KVC_PREFETCHES static inline void prefetch_bytes(const uint8_t* address, int64_t bytes) {
    constexpr int64_t kLine = 64;
    for (int64_t offset = 0; offset < bytes; offset += kLine) __builtin_prefetch(address + offset);
}

/// Prefetches the codes of a token.
KVC_PREFETCHES static inline void prefetch_row(const Table& table, int64_t number) {
    prefetch_bytes(row_of(table, number).codes, table.stride);
}

/// Prefetches the codes of `rows` tokens in order.
KVC_PREFETCHES static inline void prefetch_rows(const Table& table, int64_t number, int64_t rows) {
    prefetch_bytes(table.vectors.codes + number * table.stride, rows * table.stride);
}

/// Prefetches the scales and minima of `count` tokens in order, from the token `first` on.
KVC_PREFETCHES static inline void prefetch_numbers(const Vectors& vectors, int64_t first, int64_t count) {
    const int64_t bytes = bytes_of_scales(vectors.format, vectors.head_size);
    if (vectors.scales != nullptr) prefetch_bytes(vectors.scales + first * bytes, count * bytes);
    if (vectors.minima != nullptr) prefetch_bytes(vectors.minima + first * bytes, count * bytes);
}

}  // namespace kvc::KVC_TARGET
