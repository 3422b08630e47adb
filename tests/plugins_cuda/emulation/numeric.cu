// Conversions, order and vector accesses of kernels/numeric.cuh, kernels/fp8.cuh and kernels/code_pairs.cuh on whole arrays.
#include "emulation/toy.h"
#include "kernels/code_pairs.cuh"
#include "kernels/fp8.cuh"
#include "kernels/numeric.cuh"

namespace kvc {
namespace {

template <class T>
void widen_array(const T* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

template <class T>
void narrow_array(const float* from, T* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = from_float<T>(from[i]);
}

template <class T>
void widen_bytes_array(const uint32_t* from, uint32_t* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = widen_upper_bytes<T>(from[i]);
}

// The units' codes in the order of channels; then, of every two units, those of each channel.
template <VectorFormat kFormat, class T>
void widen_codes_array(const uint2* units, uint4* pairs, uint32_t* channels, int64_t n) {
    for (int64_t i = 0; i < n; ++i) pairs[i] = widen_pairs<kFormat, T>(units[i]);
    for (int64_t i = 0; i < n / 2 * 8; ++i) {
        channels[i] = widen_channel<kFormat, T>(units[i / 8 * 2], units[i / 8 * 2 + 1], static_cast<int>(i % 8));
    }
}

template <class T>
struct VectorParams {
    const T* from;  // [kVectorWidth]
    T* converted;   // [kVectorWidth]: through fp32
    T* copied;      // [kVectorWidth]
};

template <class T>
__global__ void vectors(const VectorParams<T> params) {
    wait_for_previous_launch();
    float values[kVectorWidth<T>];
    load_vector(params.from, values);
    for (int i = 0; i < kVectorWidth<T>; ++i) params.converted[i] = from_float<T>(values[i]);
    copy_vector(params.copied, params.from);
}

template <class T>
const char* run(const void* from, void* converted, void* copied) {
    const VectorParams<T> params{static_cast<const T*>(from), static_cast<T*>(converted), static_cast<T*>(copied)};
    return message_of([&](Stream& stream) { launch<vectors<T>>("vectors", 1, 1, 0, stream, params); });
}

}  // namespace
}  // namespace kvc

extern "C" {

void widen_half(const kvc::half_t* from, float* to, int64_t n) { kvc::widen_array(from, to, n); }
void widen_bfloat16(const kvc::bfloat16_t* from, float* to, int64_t n) { kvc::widen_array(from, to, n); }
void widen_fp8(const kvc::fp8_t* from, float* to, int64_t n) { kvc::widen_array(from, to, n); }
void widen_bytes_half(const uint32_t* from, uint32_t* to, int64_t n) {
    kvc::widen_bytes_array<kvc::half_t>(from, to, n);
}
void widen_bytes_bfloat16(const uint32_t* from, uint32_t* to, int64_t n) {
    kvc::widen_bytes_array<kvc::bfloat16_t>(from, to, n);
}
void widen_codes_half(int fp8, const uint2* units, uint4* pairs, uint32_t* channels, int64_t n) {
    using namespace kvc;
    fp8 != 0 ? widen_codes_array<VectorFormat::kFp8, half_t>(units, pairs, channels, n)
             : widen_codes_array<VectorFormat::kInt8, half_t>(units, pairs, channels, n);
}
void widen_codes_bfloat16(int fp8, const uint2* units, uint4* pairs, uint32_t* channels, int64_t n) {
    using namespace kvc;
    fp8 != 0 ? widen_codes_array<VectorFormat::kFp8, bfloat16_t>(units, pairs, channels, n)
             : widen_codes_array<VectorFormat::kInt8, bfloat16_t>(units, pairs, channels, n);
}
void narrow_half(const float* from, kvc::half_t* to, int64_t n) { kvc::narrow_array(from, to, n); }
void narrow_bfloat16(const float* from, kvc::bfloat16_t* to, int64_t n) { kvc::narrow_array(from, to, n); }

void order_keys(const float* from, uint32_t* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = kvc::order_key(from[i]);
}
void maxima(const float* a, const float* b, float* larger, int64_t n) {
    for (int64_t i = 0; i < n; ++i) larger[i] = kvc::nan_max(a[i], b[i]);
}
void lowest(float* to) {
    to[0] = kvc::lowest_finite<float>();
    to[1] = kvc::lowest_finite<kvc::half_t>();
    to[2] = kvc::lowest_finite<kvc::bfloat16_t>();
    to[3] = kvc::lowest_finite<kvc::fp8_t>();
}

const char* run_vectors(int dtype, const void* from, void* converted, void* copied) {
    if (dtype == 0) return kvc::run<float>(from, converted, copied);
    if (dtype == 1) return kvc::run<kvc::half_t>(from, converted, copied);
    return kvc::run<kvc::bfloat16_t>(from, converted, copied);
}
}
