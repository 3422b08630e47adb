// Page bounds in 8 bits: fp8 E5M2, the upper byte of an fp16. Bounds are maxima, of K and of -K, so a number becomes the
// smallest one of fp8 that is not below it: a bound may promise more than a page holds, never less.
//
// A number above the largest one, 57,344, becomes 57,344, and so does NaN; below the lowest, the lowest. No code is an
// infinity, NaN or -0.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"

namespace kvc {

struct fp8_t {
    uint8_t bits;
};

template <class Bound>
inline constexpr bool kIsFp8 = std::is_same_v<Bound, fp8_t>;

template <>
__device__ __forceinline__ float lowest_finite<fp8_t>() {
    return -57344.0f;
}

__device__ __forceinline__ float to_float(fp8_t x) {
    const auto bits = static_cast<uint16_t>(x.bits << 8);
    half_t wide;
    memcpy(&wide, &bits, sizeof bits);
    return to_float(wide);
}

// Rounds up, unlike the other types' conversions. Numbers of fp8 with exponent e are 2^(e-2) apart, and so are those
// below 2^-14, its lowest exponent; all products here are exact. Codes of neighbouring exponents continue each other.
template <>
__device__ __forceinline__ fp8_t from_float<fp8_t>(float x) {
    constexpr int kBias = 127, kMantissaBits = 23, kLowestExponent = -14;
    const float lowest = lowest_finite<fp8_t>();
    const float number = x < -lowest ? fmaxf(x, lowest) : -lowest;  // NaN is not below anything
    const int own = static_cast<int>(__float_as_uint(number) >> kMantissaBits & 0xffu) - kBias;
    const int exponent = max(own, kLowestExponent);
    const float steps = ceilf(number * __uint_as_float(static_cast<uint32_t>(kBias + 2 - exponent) << kMantissaBits));
    const int magnitude = 4 * (exponent - kLowestExponent) + static_cast<int>(fabsf(steps));
    return {static_cast<uint8_t>(steps < 0.0f ? magnitude | 0x80 : magnitude)};
}

// Converts the fp8 numbers in the upper bytes of the two halves of `pair` to T, a 16-bit type. The lower bytes do not
// matter.
template <class T>
__device__ __forceinline__ uint32_t widen_upper_bytes(uint32_t pair) {
    if constexpr (std::is_same_v<T, half_t>) {
        return pair & 0xff00ff00u;
    } else {
        // Exponent and mantissa in bf16's places; its bias is larger by 112. Subnormal numbers come out right as well.
        constexpr uint32_t kTwoTo112 = 0x77807780u;
        const uint32_t scaled = (pair & 0x80008000u) | (pair >> 3 & 0x0fe00fe0u);
        return platform::multiply_pairs(T{}, scaled, kTwoTo112);
    }
}

}  // namespace kvc
