// Stores vectors in a cache format, and reads them back: the bits of kvc_trt/reference/stored.py. Divisions are rounded
// correctly, codes and float16 numbers to the nearest, ties to even.
#include "kernels/store.h"

#include "kernels/cache_formats.h"

namespace kvc::KVC_TARGET {
namespace {

constexpr float kLargestHalf = 65504.0f;
constexpr uint16_t kHalfNan = 0x7e00, kHalfOne = 0x3c00;
constexpr uint8_t kExponentNan = 255, kExponentOfZero = 127;
constexpr int32_t kInfinity = 0x7f800000;

int32_t bits_of(float number) {
    int32_t bits;
    __builtin_memcpy(&bits, &number, sizeof bits);
    return bits;
}

float number_of(int32_t bits) {
    float number;
    __builtin_memcpy(&number, &bits, sizeof number);
    return number;
}

Integers bits_of(Vector numbers) { return reinterpret_cast<Integers>(numbers); }

/// Rounds a number of at most 65504 in magnitude to float16.
uint16_t half_of(float number) {
    const int32_t bits = bits_of(number), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    constexpr int32_t kLeastNormal = 0x38800000, kHalf = 0x3f000000;  // 2^-14, 0.5: next to it floats lie 2^-24 apart
    if (magnitude < kLeastNormal) {
        return static_cast<uint16_t>(sign | (bits_of(number_of(magnitude) + number_of(kHalf)) - kHalf));
    }
    const int32_t rounded = (magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13;
    return static_cast<uint16_t>(sign | (rounded - (112 << 10)));
}

/// A finite float16 as a float.
float number_of_half(uint16_t half) {
    const float magnitude = number_of((half & 0x7fff) << 13) * 0x1p112f;
    return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

/// A scale as it is stored: rounded to float16, 1 where it would be 0.
uint16_t stored_scale(float exact) {
    const uint16_t half = half_of(exact < kLargestHalf ? exact : kLargestHalf);
    return half == 0 ? kHalfOne : half;
}

/// Calls one(place, vector, count) for each vector of `size` floats; the last one may be filled up with zeros.
template <class One>
inline void by_vector(const float* floats, int64_t size, const One& one) {
    int64_t place = 0;
    for (; place + kWidth <= size; place += kWidth) one(place, load(floats + place), int64_t{kWidth});
    if (place < size) one(place, load_first(floats + place, size - place), size - place);
}

/// Writes the low bytes of `count` whole numbers.
void store_bytes(uint8_t* target, Integers numbers, int64_t count) {
    const SignedCodes bytes = __builtin_convertvector(numbers, SignedCodes);
    std::memcpy(target, &bytes, static_cast<size_t>(count));
}

/// The nearest whole numbers to numbers of small magnitude, ties to even.
Integers rounded(Vector numbers) { return bits_of(numbers + kRounding) - bits_of(all(kRounding)); }

Vector clipped(Vector numbers, float least, float most) {
    const Vector above = numbers < all(least) ? all(least) : numbers;
    return above > all(most) ? all(most) : above;
}

/// The bits of the largest magnitude: kInfinity or more for a vector that is not finite.
int32_t largest_magnitude(const float* vector, int64_t size) {
    Integers largest{};
    by_vector(vector, size, [&](int64_t, Vector here, int64_t) {
        const Integers magnitude = bits_of(here) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    });
    int32_t found = 0;
    for (int lane = 0; lane < kWidth; ++lane) found = largest[lane] > found ? largest[lane] : found;
    return found;
}

void store_int8(const float* vector, int64_t size, float largest, uint8_t* codes, uint8_t* scale) {
    const uint16_t half = stored_scale(largest / 127.0f);
    std::memcpy(scale, &half, sizeof half);
    const float step = number_of_half(half);
    by_vector(vector, size, [&](int64_t place, Vector here, int64_t count) {
        store_bytes(codes + place, rounded(clipped(here / step, -127.0f, 127.0f)), count);
    });
}

/// E4M3 codes of numbers, which are clipped to 448.
Integers e4m3_of(Vector numbers) {
    const Vector clip = clipped(numbers, -448.0f, 448.0f);
    const Integers bits = bits_of(clip), magnitude = bits & 0x7fffffff;
    constexpr int32_t kLeastNormal = 0x3c800000;  // 2^-6
    const Vector spread = all(0x1p14f);           // next to it floats lie 2^-9 apart, as the codes below 2^-6 do
    const Integers normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    const Integers small = bits_of(reinterpret_cast<Vector>(magnitude) + spread) - bits_of(spread);
    return (magnitude < kLeastNormal ? small : normal) | (bits >> 24 & 0x80);
}

void store_fp8(const float* vector, int64_t size, float largest, uint8_t* codes, uint8_t* exponent) {
    // 448 is 1.75 * 2^8: adding the difference of its mantissa to 2 carries into the exponent of every larger number.
    const int32_t carried = ((bits_of(largest) + 0x1fffff) >> 23) - 8;
    *exponent = largest > 0.0f ? static_cast<uint8_t>(carried > 0 ? carried : 0) : kExponentOfZero;
    const Vector inverse = powers_of_bytes(Codes{} + static_cast<uint8_t>(2 * kExponentOfZero - *exponent));
    by_vector(vector, size, [&](int64_t place, Vector here, int64_t count) {
        const Integers code = e4m3_of(here * inverse);
        store_bytes(codes + place, here == Vector{} ? Integers{} : code, count);  // -0 is read as 0
    });
}

/// Stores one group of channels, of which there is an even number.
void store_int4_group(const float* group, int64_t size, uint8_t* codes, uint8_t* scale, uint8_t* minimum) {
    float least = group[0], most = group[0];
    for (int64_t channel = 1; channel < size; ++channel) {
        least = group[channel] < least ? group[channel] : least;
        most = group[channel] > most ? group[channel] : most;
    }
    const float clip = least < -kLargestHalf ? -kLargestHalf : least > kLargestHalf ? kLargestHalf : least;
    const uint16_t half = half_of(clip), low = (half & 0x7fff) == 0 ? 0 : half;  // no -0
    const uint16_t step = stored_scale((most - least) / 15.0f);
    std::memcpy(minimum, &low, sizeof low);
    std::memcpy(scale, &step, sizeof step);
    const float offset = number_of_half(low), width = number_of_half(step);
    by_vector(group, size, [&](int64_t place, Vector here, int64_t count) {
        const Integers level = rounded(clipped((here - offset) / width, 0.0f, 15.0f));
        for (int lane = 0; lane < count; lane += 2) {
            codes[(place + lane) / 2] = static_cast<uint8_t>(level[lane] | level[lane + 1] << 4);
        }
    });
}

/// Stores a vector that is not finite: it is NaN in all channels, and no other is changed.
void store_nan(const WritableVectors& target) {
    const int64_t size = target.head_size, groups = groups_of(target.format, size);
    std::memset(target.codes, 0, static_cast<size_t>(bytes_of_codes(target.format, size)));
    if (target.format == VectorFormat::kFp8) {
        *target.scales = kExponentNan;
        return;
    }
    for (int64_t group = 0; group < groups; ++group) {
        std::memcpy(target.scales + 2 * group, &kHalfNan, sizeof kHalfNan);
        if (target.minima != nullptr) std::memcpy(target.minima + 2 * group, &kHalfNan, sizeof kHalfNan);
    }
}

void store_vector(const float* vector, const WritableVectors& target) {
    const int64_t size = target.head_size;
    const int32_t largest = largest_magnitude(vector, size);
    if (largest >= kInfinity) return store_nan(target);
    switch (target.format) {
        case VectorFormat::kExact: break;
        case VectorFormat::kInt8: return store_int8(vector, size, number_of(largest), target.codes, target.scales);
        case VectorFormat::kFp8: return store_fp8(vector, size, number_of(largest), target.codes, target.scales);
        case VectorFormat::kInt4: {
            const int64_t groups = groups_of(target.format, size), channels = size / groups;
            for (int64_t group = 0; group < groups; ++group) {
                store_int4_group(vector + group * channels, channels, target.codes + group * channels / 2,
                                 target.scales + 2 * group, target.minima + 2 * group);
            }
        }
    }
}

/// Widens vectors of a format that is not kExact.
template <VectorFormat Format>
void widen(const Vectors& vectors, int64_t count, float* target) {
    constexpr int64_t kAtOnce = 16;
    constexpr int kParts = kVectors<Format>, kStretch = kParts * kWidth;
    float numbers[numbers_scratch(kAtOnce, kLargestStoredHead)];
    const int64_t size = vectors.head_size;
    for (int64_t first = 0; first < count; first += kAtOnce) {
        const int64_t here = count - first < kAtOnce ? count - first : kAtOnce;
        const Table table = open_table<Format>(from_token(vectors, first), nullptr, here, numbers);
        for (int64_t token = 0; token < here; ++token) {
            const Row row = row_of(table, token);
            float* const place = target + (first + token) * size;
            for (int64_t channel = 0; channel < size; channel += kStretch) {
                const int64_t left = size - channel < kStretch ? size - channel : kStretch;
                Vector parts[kParts];
                if (left == kStretch) {
                    load_channels<Format>(row, channel, parts);
                } else {
                    load_last_channels<Format>(row, channel, left, parts);
                }
                if constexpr (kScalesSums<Format>) {
                    store_first(place + channel, parts[0] * kCodeUnit<Format> * *row.scales, left);
                } else {
                    const auto* const lanes = reinterpret_cast<const float*>(parts);
                    for (int64_t lane = 0; lane < left; ++lane) {
                        place[channel + lane] = lanes[place_of_channel<Format>(lane)];
                    }
                }
            }
        }
    }
}

}  // namespace

void store_vectors(const float* vectors, int64_t count, const WritableVectors& target) {
    const int64_t size = target.head_size;
    if (target.format == VectorFormat::kExact) {
        std::memcpy(target.codes, vectors, static_cast<size_t>(count * size) * sizeof(float));
        return;
    }
    for (int64_t token = 0; token < count; ++token) store_vector(vectors + token * size, from_token(target, token));
}

void widen_vectors(const Vectors& vectors, int64_t count, float* target) {
    switch (vectors.format) {
        case VectorFormat::kExact:
            std::memcpy(target, vectors.codes, static_cast<size_t>(count * vectors.head_size) * sizeof(float));
            return;
        case VectorFormat::kInt8: return widen<VectorFormat::kInt8>(vectors, count, target);
        case VectorFormat::kFp8: return widen<VectorFormat::kFp8>(vectors, count, target);
        case VectorFormat::kInt4: return widen<VectorFormat::kInt4>(vectors, count, target);
    }
}

}  // namespace kvc::KVC_TARGET
