// The step of a matrix product: one element in float32, or two neighbouring elements in bfloat16. Both fill four bytes,
// so that one layout and one loop serve both.
#pragma once

#include "kernels/bytes.h"
#include "kernels/vector.h"

namespace kvc::KVC_TARGET {

#if defined(__AVX512BF16__)
/// Two neighbouring elements in bfloat16, the earlier one in the low half.
enum class Pair : uint32_t {};
#endif

/// Elements of a step.
template <class Step>
inline constexpr int kElements = 2;
template <>
inline constexpr int kElements<float> = 1;

/// Steps that hold `count` elements.
template <class Step>
static constexpr int64_t steps_of(int64_t count) {
    return (count + kElements<Step> - 1) / kElements<Step>;
}

/// Steps in every lane, as bits.
static inline Vector load_steps(const void* source) {
    Vector made;
    std::memcpy(&made, source, sizeof made);
    return made;
}

static inline void store_steps(void* target, Vector steps) { std::memcpy(target, &steps, sizeof steps); }

static inline Vector add_product(Vector sum, Vector steps, float factor) { return sum + steps * factor; }

/// A vector of steps, of neighbouring elements in kElements vectors one behind the other.
static inline Vector steps_from(const Vector* floats, float) { return floats[0]; }

/// A vector of steps, each of one element of every row.
static inline Vector steps_across(const Vector* rows, float) { return rows[0]; }

#if defined(__AVX512BF16__)
static inline Vector add_product(Vector sum, Vector steps, Pair factor) {
    const auto wide = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(factor)));
    return reinterpret_cast<Vector>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(steps), wide));
}

/// Rounds to the nearest, ties to even; NaN stays NaN and denormal numbers become 0.
static inline Vector steps_from(const Vector* floats, Pair) {
    return reinterpret_cast<Vector>(
        _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(floats[1]), reinterpret_cast<__m512>(floats[0])));
}

static inline Vector steps_across(const Vector* rows, Pair) {
    const auto wide = [](Vector row) {
        const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(row)));
        return reinterpret_cast<Integers>(_mm512_maskz_cvtepu16_epi32(-1, rounded));
    };
    return reinterpret_cast<Vector>(wide(rows[0]) | (wide(rows[1]) << 16));
}
#endif

/// Turns `count` floats into steps; the second half of the last step is 0 for an odd count.
template <class Step>
static inline void to_steps(const float* source, int64_t count, Step* target) {
    constexpr int parts = kElements<Step>;
    for (int64_t place = 0; place < count; place += parts * kWidth) {
        Vector floats[parts];
        for (int part = 0; part < parts; ++part) {
            const int64_t left = count - place - part * kWidth;
            const float* const from = source + place + part * kWidth;
            floats[part] = left >= kWidth ? load(from) : left > 0 ? load_first(from, left) : Vector{};
        }
        const Vector steps = steps_from(floats, Step{});
        const int64_t left = steps_of<Step>(count - place);
        std::memcpy(target + place / parts, &steps, sizeof(Step) * static_cast<size_t>(left < kWidth ? left : kWidth));
    }
}

/// Transposes rows of floats into steps: columns[step, row] for `width` rows, zeros after the last of `rows`.
template <class Step>
static inline void transpose_to_steps(const float* source, int64_t stride, int64_t rows, int64_t count, int64_t width,
                                      Step* columns) {
    // All rows advance a few steps at a time: each row is read in whole cache lines, and writes stay close together.
    constexpr int64_t steps = kWidth, elements = kElements<Step> * steps;
    for (int64_t first = 0; first < count; first += elements) {
        const int64_t here = count - first < elements ? count - first : elements;
        Step* const target = columns + first / kElements<Step> * width;
        for (int64_t row = 0; row < rows; ++row) {
            Step made[steps];
            to_steps(source + row * stride + first, here, made);
            for (int64_t step = 0; step < steps_of<Step>(here); ++step) target[step * width + row] = made[step];
        }
        for (int64_t step = 0; step < steps_of<Step>(here); ++step) {
            for (int64_t row = rows; row < width; ++row) target[step * width + row] = Step{};
        }
    }
}

}  // namespace kvc::KVC_TARGET
