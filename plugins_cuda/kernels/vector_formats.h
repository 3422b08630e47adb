// How keys and values are stored (docs/cache-formats.md): names and sizes, for kernels, launchers, checks and plugins.
#pragma once

#include <cstdint>

namespace kvc {

/// How one vector, the D channels of a token's key or value, is stored: as it is, or as codes and numbers beside them.
enum class VectorFormat : int32_t {
    kExact,
    kInt8,  ///< a byte per channel, a scale
    kFp8,   ///< E4M3, the byte of an exponent
    kInt4,  ///< half a byte per channel; a scale and a minimum for each group of channels
};

/// The formats of a cache's keys and values.
struct CacheFormat {
    VectorFormat keys = VectorFormat::kExact;
    VectorFormat values = VectorFormat::kExact;
};

/// The same at compile time; a type each, so that the kernels' names say the format.
template <VectorFormat kOfKeys, VectorFormat kOfValues>
struct FormatPair {
    static constexpr VectorFormat kKeys = kOfKeys;
    static constexpr VectorFormat kValues = kOfValues;
};
struct ExactFormats : FormatPair<VectorFormat::kExact, VectorFormat::kExact> {};
struct Int8Formats : FormatPair<VectorFormat::kInt8, VectorFormat::kInt8> {};
struct Fp8Formats : FormatPair<VectorFormat::kFp8, VectorFormat::kFp8> {};
struct Int4Formats : FormatPair<VectorFormat::kInt4, VectorFormat::kInt4> {};
struct K8V4Formats : FormatPair<VectorFormat::kInt8, VectorFormat::kInt4> {};

/// The formats by the number of a call's cache_format.
inline constexpr CacheFormat kCacheFormats[] = {
    {},
    {VectorFormat::kInt8, VectorFormat::kInt8},
    {VectorFormat::kFp8, VectorFormat::kFp8},
    {VectorFormat::kInt4, VectorFormat::kInt4},
    {VectorFormat::kInt8, VectorFormat::kInt4},
};

/// The formats of a validated cache_format.
constexpr CacheFormat formats_of(int32_t cache_format) { return kCacheFormats[cache_format]; }

/// Channels that share a scale and a minimum in int4, where they divide the head.
inline constexpr int32_t kGroupChannels = 32;

/// The groups of a vector in int4.
constexpr int64_t groups_of(int64_t head_size) {
    return head_size % kGroupChannels == 0 ? head_size / kGroupChannels : 1;
}

/// The numbers, of one kind, that a vector in a format has; 0 where it is exact.
constexpr int64_t numbers_of(VectorFormat format, int64_t head_size) {
    return format == VectorFormat::kExact ? 0 : format == VectorFormat::kInt4 ? groups_of(head_size) : 1;
}

/// Bytes of a vector's elements or codes.
constexpr int64_t code_bytes(VectorFormat format, int64_t head_size, int64_t element_bytes) {
    return format == VectorFormat::kExact  ? head_size * element_bytes
           : format == VectorFormat::kInt4 ? head_size / 2
                                           : head_size;
}

/// Bytes of a vector's scales.
constexpr int64_t scale_bytes(VectorFormat format, int64_t head_size) {
    return numbers_of(format, head_size) * (format == VectorFormat::kFp8 ? 1 : 2);
}

/// Bytes of a vector's minima.
constexpr int64_t minimum_bytes(VectorFormat format, int64_t head_size) {
    return format == VectorFormat::kInt4 ? numbers_of(format, head_size) * 2 : 0;
}

}  // namespace kvc
