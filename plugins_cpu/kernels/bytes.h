// Vectors of bytes, and products of bytes, as wide as the instruction set's registers.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/vector.h"

namespace kvc::KVC_TARGET {

inline constexpr int kBytes = 4 * kWidth;

typedef uint8_t Bytes __attribute__((vector_size(4 * KVC_WIDTH)));

static inline Bytes load_bytes(const void* source) {
    Bytes made;
    std::memcpy(&made, source, sizeof made);
    return made;
}

static inline Integers load_integers(const int32_t* source) {
    Integers made;
    std::memcpy(&made, source, sizeof made);
    return made;
}

static inline Integers all_integers(int32_t value) { return Integers{} + value; }

/// Four neighbouring bytes in every lane.
static inline Bytes all_bytes(const void* source) {
    int32_t four;
    std::memcpy(&four, source, sizeof four);
    return reinterpret_cast<Bytes>(all_integers(four));
}

typedef int16_t Pairs __attribute__((vector_size(4 * KVC_WIDTH)));

/// The sum of each pair's products.
static inline Integers sums_of_pairs(Pairs one, Pairs other) {
#if defined(__AVX512BW__)
    return reinterpret_cast<Integers>(
        _mm512_madd_epi16(reinterpret_cast<__m512i>(one), reinterpret_cast<__m512i>(other)));
#elif defined(__AVX2__)
    return reinterpret_cast<Integers>(
        _mm256_madd_epi16(reinterpret_cast<__m256i>(one), reinterpret_cast<__m256i>(other)));
#else
    Integers made;
    for (int lane = 0; lane < kWidth; ++lane) {
        made[lane] = one[2 * lane] * other[2 * lane] + one[2 * lane + 1] * other[2 * lane + 1];
    }
    return made;
#endif
}

/// The sums of two products each of levels (unsigned) and inputs (signed), which may not exceed 16 bits.
static inline Pairs products_in_pairs(Bytes levels, Bytes input) {
#if defined(__AVX512BW__)
    return reinterpret_cast<Pairs>(
        _mm512_maddubs_epi16(reinterpret_cast<__m512i>(levels), reinterpret_cast<__m512i>(input)));
#elif defined(__AVX2__)
    return reinterpret_cast<Pairs>(
        _mm256_maddubs_epi16(reinterpret_cast<__m256i>(levels), reinterpret_cast<__m256i>(input)));
#else
    typedef int8_t Levels __attribute__((vector_size(4 * KVC_WIDTH)));
    const Levels inputs = reinterpret_cast<Levels>(input);
    Pairs made;
    for (int pair = 0; pair < 2 * kWidth; ++pair) {
        made[pair] =
            static_cast<int16_t>(levels[2 * pair] * inputs[2 * pair] + levels[2 * pair + 1] * inputs[2 * pair + 1]);
    }
    return made;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
#define KVC_CENTRES 1
#else
#define KVC_CENTRES 0
#endif

/// True if `dot` multiplies levels less 2^(bits - 1).
template <int Bits>
inline constexpr bool kCentres = KVC_CENTRES && Bits == 8;

/// True if a panel's products are summed in 16 bits over a whole block: with 16 levels of at most 15 and inputs of at
/// most 127, a sum that starts at half of the correction stays within 16 * 11 * 127 + 16 * 4 * 127.
template <int Bits>
inline constexpr bool kInPairs = KVC_CENTRES && Bits == 4;

/// Adds to each lane the products of its four levels (unsigned) and inputs (signed, at least -127). Levels of 4 bits are
/// at most 15; levels of 8 bits may be anything, and `kCentres` says from where they count.
template <int Bits>
static inline Integers dot(Integers sum, Bytes levels, Bytes input) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Integers>(_mm512_dpbusd_epi32(
        reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(levels), reinterpret_cast<__m512i>(input)));
#else
#if defined(__AVX2__)
    if constexpr (Bits == 4) return sum + sums_of_pairs(products_in_pairs(levels, input), Pairs{} + 1);
#endif
#if KVC_CENTRES
    // The level's sign goes to the input: two products of at most 128 and 127 have room in 16 bits.
    const __m256i centred = reinterpret_cast<__m256i>(levels ^ 128);
    const __m256i turned = _mm256_sign_epi8(reinterpret_cast<__m256i>(input), centred);
    const Bytes magnitude = reinterpret_cast<Bytes>(_mm256_abs_epi8(centred));
    return sum + sums_of_pairs(products_in_pairs(magnitude, reinterpret_cast<Bytes>(turned)), Pairs{} + 1);
#else
    typedef uint16_t UnsignedPairs __attribute__((vector_size(4 * KVC_WIDTH)));
    const Pairs both = reinterpret_cast<Pairs>(input);
    const UnsignedPairs whole = reinterpret_cast<UnsignedPairs>(levels);
    const Pairs even = reinterpret_cast<Pairs>(whole & 255), odd = reinterpret_cast<Pairs>(whole >> 8);
    return sum + sums_of_pairs(even, (both << 8) >> 8) + sums_of_pairs(odd, both >> 8);
#endif
#endif
}

/// float16 numbers, by their bits.
typedef uint16_t Halves __attribute__((vector_size(2 * KVC_WIDTH)));

static inline Vector widened(Halves halves) {
#if defined(__AVX512F__)
    return reinterpret_cast<Vector>(_mm512_maskz_cvtph_ps(-1, reinterpret_cast<__m256i>(halves)));
#elif defined(__F16C__)
    return reinterpret_cast<Vector>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(halves)));
#else
    // The exponent is moved by a product, which also makes denormal numbers normal.
    typedef uint32_t Words __attribute__((vector_size(4 * KVC_WIDTH)));
    const Words words = __builtin_convertvector(halves, Words);
    const Words magnitude = (words & 0x7fff) << 13, sign = (words & 0x8000) << 16;
    const Vector moved = reinterpret_cast<Vector>(magnitude) * 0x1p112f;
    const Words infinite = reinterpret_cast<Words>((words & 0x7c00) == 0x7c00) & 0x7f800000;
    return reinterpret_cast<Vector>(reinterpret_cast<Words>(moved) | sign | infinite);
#endif
}

/// `kWidth` float16 numbers as floats.
static inline Vector load_half(const uint16_t* source) {
    Halves made;
    std::memcpy(&made, source, sizeof made);
    return widened(made);
}

/// Loads the first `count` numbers and fills the vector with zeros.
static inline Vector load_half_first(const uint16_t* source, int64_t count) {
    uint16_t whole[kWidth] = {};
    std::memcpy(whole, source, static_cast<size_t>(count) * sizeof(uint16_t));
    return load_half(whole);
}

}  // namespace kvc::KVC_TARGET
