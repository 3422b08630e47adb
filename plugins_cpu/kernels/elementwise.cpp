#include "kernels/elementwise.h"

#include "kernels/elementwise_target.h"
#include "kernels/vector.h"

namespace kvc::KVC_TARGET {

void gate(const GatedCall& call, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const float* const gates = call.gate + row * call.stride;
        const float* const ups = call.up + row * call.stride;
        float* const target = call.target + row * call.size;
        by_vector(call.size, [&](int64_t place, int64_t count) {
            const Vector x = load_some(gates + place, count);
            store_some(target + place, x * sigmoid(x) * load_some(ups + place, count), count);
        });
    }
}

void clamped_gate(const ClampedGateCall& call, int64_t first, int64_t last) {
    const Vector most = all(call.limit), least = -most;
    for (int64_t row = first; row < last; ++row) {
        const float* const gates = call.gate + row * call.size;
        const float* const ups = call.up + row * call.size;
        float* const target = call.target + row * call.size;
        by_vector(call.size, [&](int64_t place, int64_t count) {
            const Vector gate = load_some(gates + place, count) + load_some(call.gate_bias + place, count);
            const Vector up = load_some(ups + place, count) + load_some(call.up_bias + place, count);
            const Vector g = gate > most ? most : gate;
            const Vector u = up > most ? most : up < least ? least : up;
            store_some(target + place, g * sigmoid(g * call.gain) * (u + 1.0f), count);
        });
    }
}

void add_norm(const AddNormCall& call, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const float* const x = call.x + row * call.size;
        const float* const added = call.added + row * call.size;
        float* const sum = call.sum + row * call.size;
        float* const target = call.target + row * call.size;
        Vector squares{};
        by_vector(call.size, [&](int64_t place, int64_t count) {
            const Vector here = load_some(x + place, count) + load_some(added + place, count);
            squares += here * here;
            store_some(sum + place, here, count);
        });
        const float mean = sum_of_elements(squares) / static_cast<float>(call.size);
        const float factor = 1.0f / __builtin_sqrtf(mean + call.epsilon);
        by_vector(call.size, [&](int64_t place, int64_t count) {
            store_some(target + place, load_some(sum + place, count) * factor * load_some(call.weight + place, count),
                       count);
        });
    }
}

void rotate(const RotateCall& call, int64_t first, int64_t last) {
    const int64_t half = call.head_size / 2;
    for (int64_t row = first; row < last; ++row) {
        const float* const cos = call.cos + row * half;
        const float* const sin = call.sin + row * half;
        for (int64_t head = 0; head < call.heads; ++head) {
            const float* const x = call.x + row * call.stride + head * call.head_size;
            float* const target = call.target + (row * call.heads + head) * call.head_size;
            by_vector(half, [&](int64_t place, int64_t count) {
                const Vector a = load_some(x + place, count), b = load_some(x + half + place, count);
                const Vector c = load_some(cos + place, count), s = load_some(sin + place, count);
                store_some(target + place, a * c - b * s, count);
                store_some(target + half + place, b * c + a * s, count);
            });
        }
    }
}

}  // namespace kvc::KVC_TARGET
