#include "operators/page_bounds.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

namespace kvc {
namespace {

/// The larger number; NaN enters and stays.
float larger(float bound, float value) { return value <= bound || std::isnan(bound) ? bound : value; }

/// The code of the smallest E5M2 number that is not below `value`.
int8_t code_of(float value) {
    constexpr float largest = 57344.0f, least_normal = 0x1p-14f, quantum = 0x1p-16f;
    const float number = std::isnan(value) ? largest : std::clamp(value, -largest, largest);
    const float magnitude = std::fabs(number);
    const bool up = number > 0.0f;  // away from zero
    int32_t code;
    if (magnitude < least_normal) {
        const float steps = magnitude / quantum;
        code = static_cast<int32_t>(up ? std::ceil(steps) : std::floor(steps));
    } else {
        constexpr int32_t dropped = (1 << 21) - 1, rebias = (127 - 15) << 2;
        code = ((std::bit_cast<int32_t>(magnitude) + (up ? dropped : 0)) >> 21) - rebias;
    }
    return static_cast<int8_t>(up || code == 0 ? code : code - 128);  // no -0
}

/// Whole numbers that ascend with the values of codes.
int rank_of(int8_t code) { return code < 0 ? -129 - code : code; }

}  // namespace

int64_t PageBounds::pages_of(int64_t capacity, int64_t page_size, bool fp8) {
    const int64_t multiple = fp8 ? 16 : 1, together = page_size * multiple;
    return (capacity + together - 1) / together * multiple;
}

PageBounds PageBounds::at(int64_t number) const {
    const int64_t bytes = number * 2 * size_ * pages_ * static_cast<int64_t>(fp8_ ? sizeof(int8_t) : sizeof(float));
    return {static_cast<uint8_t*>(first_) + bytes, fp8_, size_, pages_};
}

void PageBounds::raise(int64_t page, const float* key) const {
    // Each row's bound is in a line of its own, and the branch on it would wait for that line.
    const int64_t size = fp8_ ? sizeof(int8_t) : sizeof(float);
    for (int64_t row = 0; row < 2 * size_; ++row) {
        __builtin_prefetch(static_cast<const uint8_t*>(first_) + (row * pages_ + page) * size);
    }
    for (int64_t row = 0; row < 2 * size_; ++row) {
        const float value = row < size_ ? key[row] : -key[row - size_];
        if (fp8_) {
            int8_t& bound = static_cast<int8_t*>(first_)[row * pages_ + page];
            const int8_t code = code_of(value);
            if (rank_of(code) > rank_of(bound)) bound = code;
        } else {
            float& bound = static_cast<float*>(first_)[row * pages_ + page];
            bound = larger(bound, value + 0.0f);  // no -0
        }
    }
}

void PageBounds::set(int64_t page, const float* keys, int64_t count) const {
    constexpr int64_t at_once = 64;  // channels
    float maxima[2][at_once];
    for (int64_t first = 0; first < size_; first += at_once) {
        const int64_t here = std::min(at_once, size_ - first);
        for (float* side : maxima) std::fill(side, side + here, -FLT_MAX);
        for (int64_t token = 0; token < count; ++token) {
            const float* const key = keys + token * size_ + first;
            for (int64_t channel = 0; channel < here; ++channel) {
                maxima[0][channel] = larger(maxima[0][channel], key[channel]);
                maxima[1][channel] = larger(maxima[1][channel], -key[channel]);
            }
        }
        for (int64_t side = 0; side < 2; ++side) {
            for (int64_t channel = 0; channel < here; ++channel) {
                const int64_t place = (side * size_ + first + channel) * pages_ + page;
                if (fp8_) {
                    static_cast<int8_t*>(first_)[place] = code_of(maxima[side][channel]);
                } else {
                    static_cast<float*>(first_)[place] = maxima[side][channel] + 0.0f;  // no -0
                }
            }
        }
    }
}

}  // namespace kvc
