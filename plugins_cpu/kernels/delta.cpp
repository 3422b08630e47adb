#include "kernels/delta.h"

#include <math.h>

#include "kernels/delta_target.h"
#include "kernels/vector.h"

namespace kvc::KVC_TARGET {
namespace {

/// Added to the sum of squares of a query or key before it is divided by its length.
constexpr float kLengthEpsilon = 1e-6f;
/// Vectors of a row of the memory that pass through registers together: sums of fewer would wait for one another.
constexpr int kTogether = kWidth == 16 ? 8 : 4;

/// One token, after the convolution.
struct Token {
    const float* query;  ///< [key_size], of length one
    const float* key;    ///< likewise
    const float* value;  ///< [value_size]
    float stays;
    float written;
};

/// Writes the convolution's weights of channels first..first+size-1, tap by tap, `stride` floats apart.
void transpose(const DeltaHead& head, int64_t first, int64_t size, float* target, int64_t stride) {
    for (int64_t channel = 0; channel < size; ++channel) {
        const float* const taps = head.convolution + (first + channel) * head.kernel;
        for (int64_t tap = 0; tap < head.kernel; ++tap) target[tap * stride + channel] = taps[tap];
    }
}

/// Writes the activated convolution of channels first..first+size-1 at a token.
void convolve(const DeltaHead& head, int64_t token, int64_t first, int64_t size, const float* weights, int64_t stride,
              float* target) {
    by_vector(size, [&](int64_t place, int64_t count) {
        Vector total{};
        for (int64_t tap = 0; tap < head.kernel; ++tap) {
            const int64_t row = token - head.kernel + 1 + tap;
            const float* const seen =
                row < 0 ? head.before + (row + head.kernel - 1) * head.channels : head.mixed + row * head.channels;
            total += load_some(seen + first + place, count) * load_some(weights + tap * stride + place, count);
        }
        store_some(target + place, total * sigmoid(total), count);
    });
}

void to_length_one(float* vector, int64_t size) {
    Vector squares{};
    by_vector(size, [&](int64_t place, int64_t count) {
        const Vector some = load_some(vector + place, count);
        squares += some * some;
    });
    const Vector factor = all(1.0f / sqrtf(sum_of_elements(squares) + kLengthEpsilon));
    by_vector(size, [&](int64_t place, int64_t count) {
        store_some(vector + place, load_some(vector + place, count) * factor, count);
    });
}

/// Passes a token through `Count` vectors of each row of the memory from column `place` on, whole ones, or one of fewer
/// elements.
template <int Count, bool Whole>
inline void pass(const DeltaHead& head, const Token& token, int64_t place, float scale, float* read) {
    const int64_t elements = Whole ? int64_t{kWidth} : head.value_size - place;
    float* const memory = head.memory + place;
    Vector known[Count] = {}, written[Count], sums[Count] = {};
    for (int64_t row = 0; row < head.key_size; ++row) {
        const float* const values = memory + row * head.value_size;
        for (int i = 0; i < Count; ++i) known[i] += load_some(values + i * kWidth, elements) * token.key[row];
    }
    for (int i = 0; i < Count; ++i) {
        const Vector value = load_some(token.value + place + i * kWidth, elements);
        written[i] = (value - known[i] * token.stays) * token.written;
    }
    for (int64_t row = 0; row < head.key_size; ++row) {
        float* const values = memory + row * head.value_size;
        for (int i = 0; i < Count; ++i) {
            const Vector before = load_some(values + i * kWidth, elements);
            const Vector after = before * token.stays + written[i] * token.key[row];
            store_some(values + i * kWidth, after, elements);
            sums[i] += after * token.query[row];
        }
    }
    for (int i = 0; i < Count; ++i) store_some(read + place + i * kWidth, sums[i] * scale, elements);
}

}  // namespace

void take_tokens(const DeltaHead& head) {
    const int64_t keys = head.key_size, values = head.value_size, width = 2 * keys + values;
    float* const weights = head.scratch;
    float* const query = weights + head.kernel * width;
    float* const key = query + keys;
    float* const value = key + keys;
    transpose(head, head.query, keys, weights, width);
    transpose(head, head.key, keys, weights + keys, width);
    transpose(head, head.value, values, weights + 2 * keys, width);
    const float scale = 1.0f / sqrtf(static_cast<float>(keys));
    for (int64_t token = 0; token < head.tokens; ++token) {
        convolve(head, token, head.query, keys, weights, width, query);
        convolve(head, token, head.key, keys, weights + keys, width, key);
        convolve(head, token, head.value, values, weights + 2 * keys, width, value);
        to_length_one(query, keys);
        to_length_one(key, keys);
        const float step = head.decay[token * head.heads] + head.decay_bias;
        const float softplus = fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)));
        const float written = 1.0f / (1.0f + expf(-head.write[token * head.heads]));
        const Token made{query, key, value, expf(-head.rate * softplus), written};
        float* const read = head.read + token * head.heads * values;
        int64_t place = 0;
        for (; place + kTogether * kWidth <= values; place += kTogether * kWidth) {
            pass<kTogether, true>(head, made, place, scale, read);
        }
        for (; place + kWidth <= values; place += kWidth) pass<1, true>(head, made, place, scale, read);
        if (place < values) pass<1, false>(head, made, place, scale, read);
    }
}

}  // namespace kvc::KVC_TARGET
