// Eight codes of a stored vector as pairs of numbers of a 16-bit type, the operands of tensor cores. The scale is not in
// them: codes are exact in fp16 and bf16, and products with them are scaled in fp32.
//
// int8 and int4 become numbers by a subtraction: a code's bits below the exponent of a constant make constant + code.
// E4M3 has the exponent and the mantissa of a number whose bias is smaller; a product with a power of two corrects that.
// In fp16 both take fewer instructions: one number holds a whole byte, and sm_89 and later convert E4M3. (To make bf16 of
// that takes more instructions than it spares.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"
#include "kernels/vector_formats.h"

namespace kvc {

// Eight channels in the form in which a cache stores them: one aligned access.
template <VectorFormat kFormat>
using ChannelUnit = std::conditional_t<kFormat == VectorFormat::kExact, uint4,
                                       std::conditional_t<kFormat == VectorFormat::kInt4, uint32_t, uint2>>;

namespace stored {

// In both halves the number of T whose last seven bits add the integers below 128 to it.
template <class T>
inline constexpr uint32_t kInteger = std::is_same_v<T, half_t> ? 0x64006400u : 0x43004300u;

// Bytes 0 and 1, or 2 and 3, of `bytes` in the lower halves of two numbers.
__device__ __forceinline__ uint32_t spread_low(uint32_t bytes) { return __byte_perm(bytes, 0, 0x4140); }
__device__ __forceinline__ uint32_t spread_high(uint32_t bytes) { return __byte_perm(bytes, 0, 0x4342); }

// Two's complement: the sign bit weighs -128. The upper bytes do not matter.
template <class T>
__device__ __forceinline__ uint32_t int8_pair(uint32_t spread) {
    return platform::subtract_pairs(T{}, (spread & 0x007f007fu) | kInteger<T>, (spread & 0x00800080u) | kInteger<T>);
}

// Two codes, each with its sign repeated above it: one shift brings the sign and the magnitude to their places.
template <class T>
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t extended) {
    if constexpr (std::is_same_v<T, half_t>) {
        return platform::multiply_pairs(T{}, extended << 7 & 0xbf80bf80u, 0x5c005c00u);  // 2^8
    } else {
        return platform::multiply_pairs(T{}, extended << 4 & 0x87f087f0u, 0x7b807b80u);  // 2^120
    }
}

// Four codes as fp16. An integer's byte with its sign bit flipped is the integer + 128, below the exponent of 1024.
template <VectorFormat kFormat>
__device__ __forceinline__ uint2 byte_halves(uint32_t codes) {
    if constexpr (kFormat == VectorFormat::kInt8) {
        constexpr uint32_t kExponents = 0x64646464u, kZeros = 0x64806480u;
        const uint32_t flipped = codes ^ 0x80808080u;
        return {platform::subtract_pairs(half_t{}, __byte_perm(flipped, kExponents, 0x4140), kZeros),
                platform::subtract_pairs(half_t{}, __byte_perm(flipped, kExponents, 0x4342), kZeros)};
    } else if constexpr (platform::kConvertsE4m3) {
        return platform::convert_e4m3(codes);
    } else {
        return {e4m3_pair<half_t>(platform::extend_bytes(codes, 0, 0, 1)),
                e4m3_pair<half_t>(platform::extend_bytes(codes, 0, 2, 3))};
    }
}

template <class T>
__device__ __forceinline__ uint32_t int4_pair(uint32_t nibbles) {
    return platform::subtract_pairs(T{}, (nibbles & 0x000f000fu) | kInteger<T>, kInteger<T>);
}

}  // namespace stored

// Eight channels as four pairs. Their order is that of the channels, but in int4: there pair j is channels j and j + 4.
template <VectorFormat kFormat, class T>
__device__ __forceinline__ uint4 widen_pairs(const ChannelUnit<kFormat>& unit) {
    if constexpr (kFormat == VectorFormat::kExact) {
        return unit;
    } else if constexpr (kFormat != VectorFormat::kInt4 && std::is_same_v<T, half_t>) {
        const uint2 first = stored::byte_halves<kFormat>(unit.x), last = stored::byte_halves<kFormat>(unit.y);
        return {first.x, first.y, last.x, last.y};
    } else if constexpr (kFormat == VectorFormat::kInt8) {
        return {stored::int8_pair<T>(stored::spread_low(unit.x)), stored::int8_pair<T>(stored::spread_high(unit.x)),
                stored::int8_pair<T>(stored::spread_low(unit.y)), stored::int8_pair<T>(stored::spread_high(unit.y))};
    } else if constexpr (kFormat == VectorFormat::kFp8) {
        return {stored::e4m3_pair<T>(platform::extend_bytes(unit.x, 0, 0, 1)),
                stored::e4m3_pair<T>(platform::extend_bytes(unit.x, 0, 2, 3)),
                stored::e4m3_pair<T>(platform::extend_bytes(unit.y, 0, 0, 1)),
                stored::e4m3_pair<T>(platform::extend_bytes(unit.y, 0, 2, 3))};
    } else {
        return {stored::int4_pair<T>(unit), stored::int4_pair<T>(unit >> 4), stored::int4_pair<T>(unit >> 8),
                stored::int4_pair<T>(unit >> 12)};
    }
}

// One channel of two units of bytes as a pair.
template <VectorFormat kFormat, class T>
__device__ __forceinline__ uint32_t widen_channel(const uint2& one, const uint2& other, int channel) {
    const uint32_t of_one = channel < 4 ? one.x : one.y, of_other = channel < 4 ? other.x : other.y;
    const int byte = channel % 4;
    if constexpr (kFormat == VectorFormat::kFp8) {
        return stored::e4m3_pair<T>(platform::extend_bytes(of_one, of_other, byte, 4 + byte));
    } else {
        return stored::int8_pair<T>(__byte_perm(of_one, of_other, byte | (4 + byte) << 8));
    }
}

// Eight channels of T in the order that `widen_pairs` gives to those of keys in a format.
template <VectorFormat kFormat>
__device__ __forceinline__ uint4 in_order_of(const uint4& channels) {
    if constexpr (kFormat == VectorFormat::kInt4) {
        return {__byte_perm(channels.x, channels.z, 0x5410), __byte_perm(channels.x, channels.z, 0x7632),
                __byte_perm(channels.y, channels.w, 0x5410), __byte_perm(channels.y, channels.w, 0x7632)};
    } else {
        return channels;
    }
}

}  // namespace kvc
