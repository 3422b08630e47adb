// Element types of caches (fp32, fp16, bf16) and their operations in kernels: conversion to and from fp32 (round to
// nearest even), 128-bit global accesses, and the order in which scores are compared.
//
// Everything here is a pure function of its arguments, so it adds nothing to the determinism argument of a kernel.
#pragma once

#include "kernels/platform.cuh"

#include <cstdint>
#include <cstring>

namespace kvc {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half_t x) { return platform::widen(x); }
__device__ __forceinline__ float to_float(bfloat16_t x) { return platform::widen(x); }

template <class T>
__device__ __forceinline__ T from_float(float x) {
    T result;
    platform::narrow(x, result);
    return result;
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}

// The most negative finite number of T, exactly representable in fp32.
template <class T>
__device__ __forceinline__ float lowest_finite();
template <>
__device__ __forceinline__ float lowest_finite<float>() {
    return -0x1.fffffep127f;
}
template <>
__device__ __forceinline__ float lowest_finite<half_t>() {
    return -65504.0f;
}
template <>
__device__ __forceinline__ float lowest_finite<bfloat16_t>() {
    return -0x1.fep127f;
}

// Elements of T in one 128-bit access.
template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

// The 16 bytes of a vector as elements.
template <class T>
struct alignas(16) Vec {
    T values[kVectorWidth<T>];
};

// out[i] = p[i] by one 128-bit load; p must be 16-byte aligned. D % 8 == 0 aligns every row of a contiguous tensor.
template <class T>
__device__ __forceinline__ void load_vector(const T* p, float (&out)[kVectorWidth<T>]) {
    const uint4 raw = platform::load_16_bytes(p);
    Vec<T> vector;
    memcpy(&vector, &raw, sizeof raw);
#pragma unroll
    for (int i = 0; i < kVectorWidth<T>; ++i) out[i] = to_float(vector.values[i]);
}

// The same 16 bytes at another place, both 16-byte aligned.
template <class T>
__device__ __forceinline__ void copy_vector(T* to, const T* from) {
    platform::store_16_bytes(to, platform::load_16_bytes(from));
}

// Ascends with the value: order_key(a) < order_key(b) where a < b. -0 and +0 are equal, NaN is 0, below -inf.
__device__ __forceinline__ uint32_t order_key(float x) {
    if (x != x) return 0;
    const uint32_t bits = x == 0.0f ? 0u : __float_as_uint(x);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// A NaN on either side wins, as in torch.maximum. (fmaxf would drop it.)
__device__ __forceinline__ float nan_max(float a, float b) { return a > b || a != a ? a : b; }

}  // namespace kvc
