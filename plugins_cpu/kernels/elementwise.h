// Element-wise work between matrix products, on some rows of a tensor per call.
#pragma once

#include <cstdint>

namespace kvc {

/// target = gate * sigmoid(gate) * up, for rows of `size` elements; those of gate and up are `stride` apart.
struct GatedCall {
    const float* gate;
    const float* up;
    float* target;  ///< [rows, size]
    int64_t stride;
    int64_t size;
};

/// target = g * sigmoid(gain * g) * (u + 1), for rows of `size` elements: g is gate plus its bias, at most `limit`, and u
/// is up plus its bias, in -limit..limit. NaN stays NaN.
struct ClampedGateCall {
    const float* gate;       ///< [rows, size]
    const float* up;         ///< likewise
    const float* gate_bias;  ///< [size]
    const float* up_bias;    ///< likewise
    float* target;           ///< [rows, size]
    int64_t size;
    float limit;
    float gain;
};

/// sum = x + added, and target = sum / sqrt(mean(sum^2) + epsilon) * weight.
struct AddNormCall {
    const float* x;       ///< [rows, size]
    const float* added;   ///< likewise
    const float* weight;  ///< [size]
    float* sum;           ///< [rows, size]
    float* target;        ///< likewise
    int64_t size;
    float epsilon;
};

/// Rotates the heads of a row by the row's angles: (a, b) becomes (a cos - b sin, b cos + a sin), a being the first half
/// of a head and b the second.
struct RotateCall {
    const float* x;    ///< [rows, stride], `heads` heads at the start of each row
    const float* cos;  ///< [rows, head_size / 2]
    const float* sin;  ///< likewise
    float* target;     ///< [rows, heads, head_size]
    int64_t stride;
    int64_t heads;
    int64_t head_size;
};

/// Each of the four functions computes rows first..last-1.
using Gate = void(const GatedCall& call, int64_t first, int64_t last);
using ClampedGate = void(const ClampedGateCall& call, int64_t first, int64_t last);
using AddNorm = void(const AddNormCall& call, int64_t first, int64_t last);
using Rotate = void(const RotateCall& call, int64_t first, int64_t last);

}  // namespace kvc
