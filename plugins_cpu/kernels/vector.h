// Vectors of floats as wide as the instruction set's registers, by GCC's vector extensions: one source for all sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define KVC_WIDTH 16
#elif defined(__AVX2__)
#define KVC_WIDTH 8
#else
#define KVC_WIDTH 4
#endif

namespace kvc::KVC_TARGET {

/// Lower than every score.
inline constexpr float kLowest = -3.4e38f;

/// Elements of a vector.
inline constexpr int kWidth = KVC_WIDTH;

typedef float Vector __attribute__((vector_size(4 * KVC_WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * KVC_WIDTH)));

/// `size` rounded up to whole vectors.
static constexpr int64_t padded(int64_t size) { return (size + kWidth - 1) / kWidth * kWidth; }

static inline Vector load(const float* source) {
    Vector made;
    std::memcpy(&made, source, sizeof made);
    return made;
}

/// Loads the first `count` elements and fills the vector with zeros.
static inline Vector load_first(const float* source, int64_t count) {
    Vector made{};
    std::memcpy(&made, source, static_cast<size_t>(count) * sizeof(float));
    return made;
}

static inline void store(float* target, Vector vector) { std::memcpy(target, &vector, sizeof vector); }

static inline void store_first(float* target, Vector vector, int64_t count) {
    std::memcpy(target, &vector, static_cast<size_t>(count) * sizeof(float));
}

/// Marks a function that does nothing but prefetch: GCC takes it for one without effect, and drops its calls unless they
/// are inlined before it looks.
#define KVC_PREFETCHES [[gnu::always_inline]]

/// Prefetches `count` floats; an address outside of any memory does no harm.
KVC_PREFETCHES static inline void prefetch(const float* source, int64_t count) {
    constexpr int64_t kLine = 16;
    for (int64_t offset = 0; offset < count; offset += kLine) __builtin_prefetch(source + offset);
}

/// The same vector, in a register from here on: GCC may otherwise read it again wherever it is multiplied.
static inline Vector held(Vector vector) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+x"(vector));
#endif
    return vector;
}

static inline Vector larger(Vector one, Vector other) { return one > other ? one : other; }

template <int... Values>
struct Numbers {};
template <int Count, int... Values>
struct Counted : Counted<Count - 1, Count - 1, Values...> {};
template <int... Values>
struct Counted<0, Values...> {
    using Type = Numbers<Values...>;
};

template <int... Lanes>
static inline Vector repeated(float value, Numbers<Lanes...>) {
    return Vector{(static_cast<void>(Lanes), value)...};
}

/// `value` in every lane. A sum with a vector of zeros would be an addition.
static inline Vector all(float value) { return repeated(value, typename Counted<kWidth>::Type{}); }

/// The element that lane `lane` reads when two vectors are summed. Each vector holds sums of several rows side by side,
/// `segment` lanes each; halves of one vector's segments alternate with those of the other, so lanes move least.
static constexpr int source_lane(int lane, int segment, bool upper) {
    const int half = segment / 2, within = lane % segment;
    return lane / segment * segment + within % half + (upper ? half : 0) + within / half * kWidth;
}

template <int Segment, int... Lanes>
static inline Vector folded(Vector one, Vector other, Numbers<Lanes...>) {
    return __builtin_shufflevector(one, other, source_lane(Lanes, Segment, false)...) +
           __builtin_shufflevector(one, other, source_lane(Lanes, Segment, true)...);
}

/// Element i of the result is the sum of the elements of rows[i]; the rows are overwritten.
template <int Segment = kWidth>
static inline Vector sum_each(Vector* rows) {
    if constexpr (Segment == 1) {
        return rows[0];
    } else {
        for (int row = 0; row < Segment / 2; ++row) {
            rows[row] = folded<Segment>(rows[row], rows[row + Segment / 2], typename Counted<kWidth>::Type{});
        }
        return sum_each<Segment / 2>(rows);
    }
}

template <int Distance, int... Lanes>
static inline Vector rotated(Vector vector, Numbers<Lanes...>) {
    return __builtin_shufflevector(vector, vector, (Lanes + Distance) % kWidth...);
}

template <int Distance = kWidth / 2>
static inline float largest_element(Vector vector) {
    if constexpr (Distance == 0) {
        return vector[0];
    } else {
        return largest_element<Distance / 2>(
            larger(vector, rotated<Distance>(vector, typename Counted<kWidth>::Type{})));
    }
}

template <int Distance = kWidth / 2>
static inline float sum_of_elements(Vector vector) {
    if constexpr (Distance == 0) {
        return vector[0];
    } else {
        return sum_of_elements<Distance / 2>(vector + rotated<Distance>(vector, typename Counted<kWidth>::Type{}));
    }
}

/// 1.5 * 2^23: adding it rounds to a whole number.
inline constexpr float kRounding = 12582912.0f;

/// 2 to the power of whole numbers in -126..127.
static inline Vector whole_power_of_two(Integers exponent) {
    const Integers bits = (exponent + 127) << 23;
    Vector made;
    std::memcpy(&made, &bits, sizeof made);
    return made;
}

/// `x` times 2 to the power of whole numbers that are at most 0. NaN stays NaN; results may be denormal.
static inline Vector scaled(Vector x, Vector power) {
#if defined(__AVX512F__)
    return reinterpret_cast<Vector>(
        _mm512_maskz_scalef_ps(-1, reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(power)));
#else
    const Integers whole = __builtin_convertvector(power, Integers), half = whole >> 1;
    return x * whole_power_of_two(half) * whole_power_of_two(whole - half);
#endif
}

/// e to the power of numbers that are at most 0, to two units in the last place. NaN stays NaN. Results too small for a
/// normal float are denormal, not 0, because softmax weights are compared with one another.
static inline Vector exponential(Vector x) {
    const Vector lowest = all(-104.0f);
    const Vector clamped = x < lowest ? lowest : x;
    const Vector rounding = all(kRounding);
    const Vector whole = (clamped * 1.44269504f + rounding) - rounding;
    // ln 2 in two parts, the first with few enough bits for an exact product.
    const Vector rest = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Vector sum = all(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1.0f;
    return scaled(sum, whole);
}

/// 2 to the power of numbers that are at most 0: accurate to 2.2e-7 of the result if `Exact`, else to 7.5e-5, a tenth
/// of the error of rounding to bfloat16. NaN stays NaN.
template <bool Exact>
static inline Vector power_of_two(Vector x) {
    const Vector lowest = all(-150.0f);
    const Vector clamped = x < lowest ? lowest : x;
    const Vector rounding = all(kRounding);
    const Vector whole = (clamped + rounding) - rounding, rest = clamped - whole;
    // The polynomial with the least largest relative error in -1/2..1/2.
    if constexpr (Exact) {
        Vector sum = all(1.3276471519e-3f);
        sum = sum * rest + 9.6755413307e-3f;
        sum = sum * rest + 5.5507132750e-2f;
        sum = sum * rest + 2.4022119724e-1f;
        sum = sum * rest + 6.9314696706e-1f;
        return scaled(sum * rest + 1.0f, whole);
    } else {
        Vector sum = all(5.5171664930e-2f);
        sum = sum * rest + 2.4261112188e-1f;
        sum = sum * rest + 6.9326098622e-1f;
        return scaled(sum * rest + 9.9992807358e-1f, whole);
    }
}

static inline Vector sigmoid(Vector x) {
    const Vector less = exponential(x > Vector{} ? -x : x);  // e^-|x|; NaN stays NaN
    return (x > Vector{} ? all(1.0f) : less) / (less + 1.0f);
}

/// Calls one(place, count) for each vector of `size` elements; the last vector may be partial.
template <class One>
static inline void by_vector(int64_t size, const One& one) {
    int64_t place = 0;
    for (; place + kWidth <= size; place += kWidth) one(place, kWidth);
    if (place < size) one(place, size - place);
}

static inline Vector load_some(const float* source, int64_t count) {
    return count == kWidth ? load(source) : load_first(source, count);
}

static inline void store_some(float* target, Vector vector, int64_t count) {
    if (count == kWidth) {
        store(target, vector);
    } else {
        store_first(target, vector, count);
    }
}

}  // namespace kvc::KVC_TARGET
