// Keys and values as a cache stores them: docs/cache-formats.md, kvc_trt/models/cache_formats.py.
#pragma once

#include <cstdint>

namespace kvc {

/// How a vector, the key or value of one token and KV head, is stored.
enum class VectorFormat : uint8_t { kExact, kInt8, kFp8, kInt4 };

/// Consecutive channels that share a scale and a minimum in kInt4.
inline constexpr int64_t kGroup = 32;

/// The most channels of a vector in a format that is not kExact.
inline constexpr int64_t kLargestStoredHead = 256;

/// Vectors of `head_size` channels, one token after the other.
template <class Byte>
struct VectorsOf {
    VectorFormat format;
    int64_t head_size;
    Byte* codes;   ///< [tokens, bytes_of_codes]; in kExact the vectors themselves, as floats
    Byte* scales;  ///< [tokens, groups_of] float16; in kFp8 bytes of exponents, in kExact null
    Byte* minima;  ///< [tokens, groups_of] float16 in kInt4, else null
};
using Vectors = VectorsOf<const uint8_t>;
using WritableVectors = VectorsOf<uint8_t>;

static constexpr int64_t groups_of(VectorFormat format, int64_t head_size) {
    return format == VectorFormat::kInt4 && head_size % kGroup == 0 ? head_size / kGroup : 1;
}

static constexpr int64_t bytes_of_codes(VectorFormat format, int64_t head_size) {
    if (format == VectorFormat::kExact) return head_size * int64_t{sizeof(float)};
    return format == VectorFormat::kInt4 ? head_size / 2 : head_size;
}

static constexpr int64_t bytes_of_scales(VectorFormat format, int64_t head_size) {
    return format == VectorFormat::kFp8 ? 1 : 2 * groups_of(format, head_size);
}

/// The vectors from a token on.
template <class Byte>
static inline VectorsOf<Byte> from_token(VectorsOf<Byte> vectors, int64_t token) {
    const VectorFormat format = vectors.format;
    vectors.codes += token * bytes_of_codes(format, vectors.head_size);
    if (vectors.scales != nullptr) vectors.scales += token * bytes_of_scales(format, vectors.head_size);
    if (vectors.minima != nullptr) vectors.minima += token * bytes_of_scales(format, vectors.head_size);
    return vectors;
}

static inline Vectors readable(const WritableVectors& vectors) {
    return {vectors.format, vectors.head_size, vectors.codes, vectors.scales, vectors.minima};
}

/// Vectors that are not stored in a format: floats [tokens, head_size].
static inline Vectors exact_vectors(const float* floats, int64_t head_size) {
    return {VectorFormat::kExact, head_size, reinterpret_cast<const uint8_t*>(floats), nullptr, nullptr};
}

/// Scratch floats for the scales and minima of `count` vectors of any format.
static constexpr int64_t numbers_scratch(int64_t count, int64_t head_size) {
    constexpr int64_t widest = 16;
    return (count * (head_size / kGroup + 1) + widest) * 2;
}

}  // namespace kvc
