// Keys and values as caches in a format hold them: how a warp stores a vector, and how its channels are read back.
//
// Source: kvc_trt/reference/stored.py, which these bits equal (docs/cache-formats.md has the formulas). All arithmetic is
// fp32, division is rounded correctly, and numbers are rounded half to even. -0 is read as 0, and a minimum is never -0.
// A vector with a NaN or an infinity is stored as one that is NaN in all channels.
//
// A warp stores a vector: lane i has channels 8 i to 8 i + 7. The format is a uniform branch: a kernel that stores is
// not bound by arithmetic, and one kernel serves every format.
//
// Deterministic: minima and maxima are exact, so their order does not matter.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"
#include "kernels/reduce.cuh"
#include "kernels/vector_formats.h"

namespace kvc {

inline constexpr int kLaneChannels = 8;

// Keys or values of a cache: vectors of D channels, one after the other.
struct VectorTable {
    void* codes;   // [..,D] of the call's type; in a format bytes [..,D] or [..,D/2]
    void* scales;  // half_t [..,groups], or bytes of exponents [..,1]
    half_t* minima;
    VectorFormat format;
    int32_t code_bytes;  // of one vector
    int32_t groups;      // of one vector

    // Its vectors from number `first` on.
    __device__ __forceinline__ VectorTable from(int64_t first) const {
        VectorTable rest = *this;
        rest.codes = static_cast<char*>(codes) + first * code_bytes;
        if (format != VectorFormat::kExact) {
            const int64_t number = first * groups;
            rest.scales = static_cast<char*>(scales) + number * (format == VectorFormat::kFp8 ? 1 : 2);
            rest.minima = minima + (format == VectorFormat::kInt4 ? number : 0);
        }
        return rest;
    }
};

namespace stored {

inline constexpr float kLargestHalf = 65504.0f, kLargestE4m3 = 448.0f;
inline constexpr uint16_t kLostNumber = 0x7e00;  // fp16 NaN
inline constexpr uint8_t kLostExponent = 255;
inline constexpr int kExponentBias = 127;

__device__ __forceinline__ uint16_t half_bits(float x) {
    const half_t rounded = from_float<half_t>(x);
    uint16_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}

__device__ __forceinline__ float half_number(uint16_t bits) {
    half_t number;
    memcpy(&number, &bits, sizeof bits);
    return to_float(number);
}

// The number that an exponent's byte stands for: 2^(byte - 127), NaN for 255.
__device__ __forceinline__ float power_of(int byte) {
    const uint32_t bits = byte == 0               ? 0x00400000u
                          : byte == kLostExponent ? 0x7fc00000u
                                                  : static_cast<uint32_t>(byte) << 23;
    return __uint_as_float(bits);
}

// A positive number as a scale, in fp16; 1 where it would be 0.
__device__ __forceinline__ uint16_t scale_bits(float wanted) {
    const uint16_t bits = half_bits(fminf(wanted, kLargestHalf));
    return (bits & 0x7fffu) == 0 ? uint16_t{0x3c00} : bits;  // a maximum of zeros may be -0
}

// The exponent's byte of a vector whose largest magnitude is `largest`: the smallest that leaves no number above 448.
// 448 is 1.75 * 2^8: adding the difference of its mantissa to 2 carries into the exponent of every larger number.
__device__ __forceinline__ int exponent_byte(float largest) {
    const int carried = static_cast<int>((__float_as_uint(largest) + 0x1fffffu) >> 23) - 8;
    return largest > 0.0f ? min(max(carried, 0), 254) : kExponentBias;
}

// E4M3 of a number in -448..448, half to even. Numbers below 2^-6 are 2^-9 apart; the codes of both kinds continue each
// other.
__device__ __forceinline__ uint32_t e4m3_code(float x) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    uint32_t code;
    if (magnitude < 0x3c800000u) {
        code = static_cast<uint32_t>(rintf(__uint_as_float(magnitude) * 512.0f));
    } else {
        code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    }
    return code | (bits >> 24 & 0x80u);
}

// The number of an E4M3 code that is not NaN.
__device__ __forceinline__ float e4m3_number(uint32_t code) {
    const float scaled = __uint_as_float((code & 0x7fu) << 20) * 0x1p120f;
    return (code & 0x80u) != 0 ? -scaled : scaled;
}

// The largest value of the lanes of this lane's group, whose number is a power of two. No NaN among them.
__device__ __forceinline__ float largest_of(float value, int lanes) {
    for (int step = 1; step < lanes; step *= 2) {
        value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
    }
    return value;
}

// What a lane stores of a vector.
struct Codes {
    uint32_t words[2];  // one byte or, in the first word alone, half a byte per channel
    uint16_t scale;     // or the byte of an exponent
    uint16_t minimum;
};

// Eight bytes, each code in the lower bits of its number.
__device__ __forceinline__ void pack_bytes(const int (&codes)[kLaneChannels], uint32_t (&words)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        words[half] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[half] |= (static_cast<uint32_t>(codes[4 * half + i]) & 0xffu) << 8 * i;
        }
    }
}

__device__ __forceinline__ float clipped_steps(float distance, float scale, float low, float high) {
    return fminf(fmaxf(rintf(__fdiv_rn(distance, scale)), low), high);
}

}  // namespace stored

// A scale and a minimum of a vector, as they are stored: the minimum, where the format has one, in the upper half.
using VectorNumbers = uint32_t;

// The numbers of one group of a vector of a KV head, whose vectors are in `table`. Offsets are below 2^20 * 8 numbers.
template <VectorFormat kFormat>
__device__ __forceinline__ VectorNumbers read_numbers(const VectorTable& table, int slot, int group) {
    if constexpr (kFormat == VectorFormat::kFp8) {
        return static_cast<const uint8_t*>(table.scales)[slot];
    } else if constexpr (kFormat == VectorFormat::kInt8) {
        return static_cast<const uint16_t*>(table.scales)[slot];
    } else {
        const int number = slot * table.groups + group;
        uint16_t minimum;
        memcpy(&minimum, table.minima + number, sizeof minimum);
        return static_cast<const uint16_t*>(table.scales)[number] | static_cast<uint32_t>(minimum) << 16;
    }
}
template <VectorFormat kFormat>
__device__ __forceinline__ float scale_of(VectorNumbers numbers) {
    return kFormat == VectorFormat::kFp8 ? stored::power_of(static_cast<int>(numbers))
                                         : stored::half_number(static_cast<uint16_t>(numbers));
}
// The same for sums of products with a vector's codes, in two instructions for fp8: there it is an infinity for the byte
// 255, which makes NaN of the zeros that such a vector has as codes.
template <VectorFormat kFormat>
__device__ __forceinline__ float factor_of(VectorNumbers numbers) {
    constexpr uint32_t kSmallest = 0x00400000u;
    return kFormat == VectorFormat::kFp8 ? __uint_as_float(max(numbers << 23, kSmallest)) : scale_of<kFormat>(numbers);
}
__device__ __forceinline__ float minimum_of(VectorNumbers numbers) {
    return stored::half_number(static_cast<uint16_t>(numbers >> 16));
}

// Four neighbouring channels as they are read back; `codes` is the address of the first, a multiple of 4.
template <VectorFormat kFormat>
__device__ __forceinline__ void widen_four(const char* codes, VectorNumbers numbers, float (&to)[4]) {
    const float scale = scale_of<kFormat>(numbers);
    if constexpr (kFormat == VectorFormat::kInt4) {
        const auto bits = platform::load_vector_of<uint16_t>(codes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to[i] = static_cast<float>(bits >> 4 * i & 0xf) * scale + minimum_of(numbers);
        }
    } else {
        const auto bits = platform::load_vector_of<uint32_t>(codes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t code = bits >> 8 * i & 0xffu;
            to[i] = scale * (kFormat == VectorFormat::kFp8 ? stored::e4m3_number(code)
                                                           : static_cast<float>(static_cast<int8_t>(code)));
        }
    }
}

// Stores a vector of `head_size`, of which each lane has eight channels, NaN or not; all lanes of a warp call it, and lanes
// past the head have zeros. Writes the parts that `to` has, none where it has no address of codes, and replaces the
// channels by the dequantised ones.
__device__ __forceinline__ void store_vector(float (&channels)[kLaneChannels], int head_size, const VectorTable& to) {
    const int lane = lane_index();
    const bool inside = lane * kLaneChannels < head_size;
    const bool grouped = to.groups > 1;
    bool lost = false;
    float low = INFINITY, high = -INFINITY;
#pragma unroll
    for (float& x : channels) {
        lost = lost || !(fabsf(x) < INFINITY);
        x = x == 0.0f ? 0.0f : x;
        if (inside) {
            low = fminf(low, x);
            high = fmaxf(high, x);
        }
    }
    lost = __any_sync(kFullWarp, inside && lost) != 0;
    const int lanes = grouped ? kGroupChannels / kLaneChannels : kWarpSize;
    high = stored::largest_of(lost ? 0.0f : high, lanes);
    low = -stored::largest_of(lost ? 0.0f : -low, lanes);
    const float largest = fmaxf(high, -low);
    stored::Codes made{};
    int codes[kLaneChannels] = {};
    float scale = 1.0f, minimum = 0.0f;
    if (lost) {
        made.scale = to.format == VectorFormat::kFp8 ? stored::kLostExponent : stored::kLostNumber;
        made.minimum = stored::kLostNumber;
        scale = __uint_as_float(0x7fc00000u);
    } else if (to.format == VectorFormat::kInt8) {
        made.scale = stored::scale_bits(__fdiv_rn(largest, 127.0f));
        scale = stored::half_number(made.scale);
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            codes[i] = static_cast<int>(stored::clipped_steps(channels[i], scale, -127.0f, 127.0f));
        }
    } else if (to.format == VectorFormat::kFp8) {
        const int byte = stored::exponent_byte(largest);
        made.scale = static_cast<uint16_t>(byte);
        scale = stored::power_of(byte);
        const float inverse = stored::power_of(2 * stored::kExponentBias - byte);
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            const float scaled = fminf(fmaxf(channels[i] * inverse, -stored::kLargestE4m3), stored::kLargestE4m3);
            codes[i] = static_cast<int>(stored::e4m3_code(scaled));
        }
    } else {
        const float clipped = fminf(fmaxf(low, -stored::kLargestHalf), stored::kLargestHalf);
        made.minimum = stored::half_bits(clipped);
        made.minimum = (made.minimum & 0x7fffu) == 0 ? uint16_t{0} : made.minimum;
        minimum = stored::half_number(made.minimum);
        made.scale = stored::scale_bits(__fdiv_rn(high - low, 15.0f));
        scale = stored::half_number(made.scale);
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            codes[i] = static_cast<int>(stored::clipped_steps(channels[i] - minimum, scale, 0.0f, 15.0f));
        }
    }
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
        const float number = to.format == VectorFormat::kFp8 ? stored::e4m3_number(static_cast<uint32_t>(codes[i]))
                                                             : static_cast<float>(codes[i]);
        channels[i] = number * scale + minimum;
    }
    if (!inside || to.codes == nullptr) {
        return;
    }
    if (to.format == VectorFormat::kInt4) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            word |= static_cast<uint32_t>(codes[i]) << 4 * i;
        }
        platform::store_vector_of(static_cast<char*>(to.codes) + lane * 4, word);
    } else {
        stored::pack_bytes(codes, made.words);
        platform::store_vector_of(static_cast<char*>(to.codes) + lane * 8, uint2{made.words[0], made.words[1]});
    }
    const int group = grouped ? lane / lanes : 0;
    if (lane == group * lanes) {
        if (to.format == VectorFormat::kFp8) {
            static_cast<uint8_t*>(to.scales)[0] = static_cast<uint8_t>(made.scale);
        } else {
            static_cast<uint16_t*>(to.scales)[group] = made.scale;
        }
        if (to.format == VectorFormat::kInt4) {
            memcpy(to.minima + group, &made.minimum, sizeof made.minimum);
        }
    }
}

}  // namespace kvc
