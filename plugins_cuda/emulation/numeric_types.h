// fp16 and bf16 for the host: the bits that __half and __nv_bfloat16 hold, rounded to nearest even as the device does.
// Subnormals and infinities are exact; a NaN stays one (0x7fff, the device's), without its payload.
#pragma once

#include "emulation/builtins.h"
#include "emulation/vector_types.h"

#include <bit>
#include <cstdint>
#include <cstring>

namespace kvc {

struct half_t {
    uint16_t bits;
};
struct bfloat16_t {
    uint16_t bits;
};

namespace platform {

inline float widen(half_t x) {
    const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
    // The exponent moves from bias 15 to bias 127 by a product, which also normalizes subnormals, exactly.
    uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    if ((x.bits & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;
    return std::bit_cast<float>(bits | uint32_t{x.bits & 0x8000u} << 16);
}

inline float widen(bfloat16_t x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

inline void narrow(float x, half_t& result) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half = 0;
    if (magnitude > 0x7f800000u) {
        result.bits = 0x7fff;
        return;
    }
    if (magnitude >= 0x477ff000u) {  // 65520 and above: beyond the largest half, 65504, after rounding
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: numbers in [0.5, 1) are 2^-24 apart, as subnormal halves are
        half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
    } else {
        half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    }
    result.bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

inline void narrow(float x, bfloat16_t& result) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    result.bits = nan ? uint16_t{0x7fff} : static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// What `combine` makes of two pairs of numbers of T, each rounded.
template <class T, class Combine>
uint32_t combine_pairs(uint32_t a, uint32_t b, Combine&& combine) {
    uint32_t results = 0;
    for (const int shift : {0, 16}) {
        const auto number = [&](uint32_t pair) { return widen(T{static_cast<uint16_t>(pair >> shift)}); };
        T result;
        narrow(combine(number(a), number(b)), result);
        results |= uint32_t{result.bits} << shift;
    }
    return results;
}

// The products, or the differences, of two pairs of numbers, each rounded.
template <class T>
uint32_t multiply_pairs(T, uint32_t a, uint32_t b) {
    return combine_pairs<T>(a, b, [](float one, float other) { return one * other; });
}
template <class T>
uint32_t subtract_pairs(T, uint32_t a, uint32_t b) {
    return combine_pairs<T>(a, b, [](float one, float other) { return one - other; });
}

// One access; the device faults where the address is not a multiple of its size.
inline uint4 load_16_bytes(const void* from) {
    emulation::check_alignment(from, 16);
    uint4 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline void store_16_bytes(void* to, uint4 value) {
    emulation::check_alignment(to, 16);
    std::memcpy(to, &value, sizeof value);
}

// One access to a vector.
template <class Vector>
Vector load_vector_of(const void* from) {
    emulation::check_alignment(from, sizeof(Vector));
    return *static_cast<const Vector*>(from);
}
template <class Vector>
void store_vector_of(void* to, const Vector& value) {
    emulation::check_alignment(to, sizeof(Vector));
    *static_cast<Vector*>(to) = value;
}

}  // namespace platform
}  // namespace kvc
